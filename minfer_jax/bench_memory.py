"""The memory ceiling: how fast all threads together read memory that no cache holds.

    threads = 2      |<-------- 512 MB, in huge pages -------->|
                     |  thread 0 reads   |  thread 1 reads     |     best of the passes: bytes / s

Each thread folds its share with a bitwise or, which numpy does in vector instructions and without
holding Python's lock: what remains is the speed of the memory. Measured in a process of its own, so
that the buffer is not part of the peak that the bench reports.
"""

import json
import subprocess
import sys
import threading
import time

import numpy as np

from minfer_jax import memory

_BUFFER = 512 << 20  # bytes; several times any cache
_SECONDS = 0.25  # of passes, at least _PASSES of them
_PASSES = 5
_TIME_LIMIT = 120  # seconds


class CeilingError(ValueError):
    """The ceiling cannot be measured. One line."""


def ceiling(threads: int) -> float:
    """Bytes a second that so many threads read from memory, measured now.

    Raises:
        CeilingError: the process that measures failed.
    """
    command = [sys.executable, "-m", "minfer_jax.bench_memory", str(threads)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT)
        return float(json.loads(ran.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError) as e:
        raise CeilingError(f"the memory's speed could not be measured: {e}") from e


def read_rate(threads: int, n_bytes: int = _BUFFER) -> float:
    """Bytes a second at which so many threads read a buffer of that size: the best pass."""
    words = np.frombuffer(memory.large_pages(n_bytes), np.uint64)  # as weights have
    words.fill(1)  # so that there are pages behind it
    shares = np.array_split(words, threads)
    best, begin = float("inf"), time.perf_counter()
    n_pass = 0
    while n_pass < _PASSES or time.perf_counter() - begin < _SECONDS:
        n_pass += 1
        best = min(best, _pass_seconds(shares))
    return n_bytes / best


def _pass_seconds(shares: list[np.ndarray]) -> float:
    workers = [threading.Thread(target=np.bitwise_or.reduce, args=(s,)) for s in shares[1:]]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    np.bitwise_or.reduce(shares[0])
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(json.dumps(read_rate(int(sys.argv[1]))))
