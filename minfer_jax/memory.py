"""Giving freed memory back to the system."""

import ctypes
import sys


def trim() -> None:
    """Return the C allocator's free pages, where it is glibc.

    Loading and compiling free hundreds of megabytes that glibc would keep for later. What comes
    next is
    large device arrays, which it does not serve from there: without this the peak holds both.
    """
    if sys.platform.startswith("linux"):
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)
