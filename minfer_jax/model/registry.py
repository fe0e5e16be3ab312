"""The architectures that can run. A new one is a file in `archs/` and a row of this table."""

from minfer_jax.model.archs import gemma3, llama, mistral3, qwen2, qwen3, smollm3
from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelError

ARCHS: dict[str, Arch] = {
    "gemma3": gemma3.ARCH,
    "llama": llama.ARCH,
    "mistral3": mistral3.ARCH,
    "qwen2": qwen2.ARCH,
    "qwen3": qwen3.ARCH,
    "smollm3": smollm3.ARCH,
}


def find(name: str) -> Arch:
    """The architecture of that name.

    Raises:
        ModelError: there is none; the message lists those that there are.
    """
    if name not in ARCHS:
        raise ModelError(
            f"architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHS))}"
        )
    return ARCHS[name]
