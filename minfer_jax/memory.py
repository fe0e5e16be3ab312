"""Keeping the C allocator from holding on to memory, where it is glibc.

Loading and compiling free hundreds of megabytes that glibc would keep for later. What comes next is
large device arrays, which it does not serve from there: the peak would hold both.
"""

import ctypes
import sys

_M_ARENA_MAX = -8  # malloc.h


def share_arenas() -> None:
    """Let all threads that start from now on allocate from one heap.

    The compiler's threads would each have their own otherwise, and each keep what it freed.
    """
    _glibc("mallopt", _M_ARENA_MAX, 1)


def trim() -> None:
    """Return free pages to the system."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *args: int) -> None:
    if sys.platform.startswith("linux"):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*args)
