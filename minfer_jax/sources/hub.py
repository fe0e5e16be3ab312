"""Models of a Hugging Face hub: `hf:ORG/REPO`, see `hub_choice`.

Whatever is in huggingface_hub's cache is used as it is, without a look at the network.
"""

from pathlib import Path

from minfer_jax.sources.hub_cache import snapshots, whole_files
from minfer_jax.sources.hub_choice import choose, parse
from minfer_jax.sources.transfer import SourceError, not_cached


def resolve(ref: str, *, may_fetch: bool = True) -> Path:
    """Finds the local file of a hub's model, and fetches it where need be, with all its parts.

    Args:
        ref: `hf:ORG/REPO[@REVISION][:QUANT or file]`, see `hub_choice`.
        may_fetch: Whether the network may be used.

    Returns:
        The path in huggingface_hub's cache; of a split model, that of the first part.

    Raises:
        SourceError: There is no such model or several, the hub refuses or cannot be reached, or
            the cache cannot be written.
    """
    model = parse(ref)
    held: set[str] = set()
    for snapshot in snapshots(model):
        names = whole_files(snapshot)
        try:
            return snapshot / choose(model, names)[0]
        except SourceError:  # not in this one
            held.update(names)
    if not may_fetch:
        if held:  # says which there are
            choose(model, held)
        raise not_cached(ref)
    from minfer_jax.sources.hub_fetch import fetch  # 0.3 s to import

    return fetch(model, ref)
