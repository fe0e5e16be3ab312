"""What goes wrong in a case, as a row; and whether the device can still be used."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from scripts.gpu_check.rows import FAILED, Row

_LONGEST_NOTE = 300  # characters


def attempted(name: str, run: Callable[[], Row]) -> Row:
    """A row, which says why if it could not be had.

    Raises:
        Exception: what `run` raised, where it has left the device unusable.
    """
    try:
        return run()
    except Exception as e:
        if not usable():
            raise
        return Row(name=name, state=FAILED, note=in_words(e))


def in_words(error: BaseException) -> str:
    """An error in one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= _LONGEST_NOTE else text[:_LONGEST_NOTE] + "..."


def usable() -> bool:
    """A fault of a kernel, such as a wild address, ends all later work of its process."""
    try:
        return float(jax.block_until_ready(jnp.ones(8) + 1.0).sum()) == 16.0
    except Exception:  # noqa: BLE001  whatever it is, another process goes on
        return False
