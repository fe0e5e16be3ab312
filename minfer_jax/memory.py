"""The process's memory: large pages, and keeping the C allocator (glibc) from holding on to it.

Loading and compiling free hundreds of megabytes that glibc would keep for later. What comes next is
large device arrays, which it does not serve from there: the peak would hold both.
"""

import contextlib
import ctypes
import mmap
import re
import sys
from pathlib import Path

_M_ARENA_MAX = -8  # malloc.h


def ran_out(error: MemoryError | RuntimeError) -> bool:
    """Whether there was no memory left; jax's errors are known by what they say, not loaded."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


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


def available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that may still be allocated, as Linux says; None where the system does not."""
    try:
        text = meminfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def large_pages(n_bytes: int) -> mmap.mmap:
    """Zeros of their own, aligned to a page; on large pages where the system has them.

    With small ones the processor spends a good part of a decode step on looking up addresses (23
    against 34 GB/s on a virtual Zen 4).
    """
    size = max(n_bytes, 1)
    if not sys.platform.startswith("linux"):
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones are small
    with contextlib.suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
