"""What a command that was run has left."""

from typing import NamedTuple


class Ran(NamedTuple):
    """Its exit status, and what it wrote."""

    status: int
    out: str
    err: str
