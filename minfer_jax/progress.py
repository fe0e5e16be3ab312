"""The bar of a long piece of work, on a terminal; elsewhere there is none."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(total: int, unit: str, called: str, *, scaled: bool = False) -> Iterator[Callable]:
    """A function that takes how much more is done; on a terminal it draws a bar after a second.

    Args:
        total: how much there is.
        unit: of what.
        called: what the work is.
        scaled: shown in thousands, millions and so on.
    """
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from tqdm import tqdm  # not needed elsewhere, and 0.02 s to import

    with tqdm(
        total=total, unit=unit, unit_scale=scaled, desc=called, delay=1.0, leave=False
    ) as shown:

        def advance(n: int) -> None:
            shown.update(n)

        yield advance
