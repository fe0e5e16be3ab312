"""jax's compile cache, set for a while and put back."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from minfer_jax.compile_cache import EVERYTHING

FOLDER = "jax_compilation_cache_dir"


@contextlib.contextmanager
def compile_cache_of(folder: str | None, **others: object) -> Iterator[None]:
    """With this folder and these settings, whatever is done to them meanwhile."""
    before = {name: jax.config.values[name] for name in (FOLDER, *EVERYTHING)}

    def use(values: dict[str, object]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()

    use({FOLDER: folder, **others})
    try:
        yield
    finally:
        use(before)
