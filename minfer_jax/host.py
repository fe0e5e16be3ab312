"""What this machine is, and where the user's cache is."""

import os
import platform
import sys
from pathlib import Path

CACHE = "~/.cache/minfer"


def processors() -> tuple[int, ...]:
    """Numbers of the processors that this process may use, as its affinity allows."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def use_threads(n: int | None) -> int:
    """Choose how many threads jax computes with on the CPU.

    XLA's CPU client reads $NPROC when it starts, so this comes before anything runs on a device.

    Args:
        n: threads wanted, at least 1; more than there are processors is as many as there are.
            None leaves it to $NPROC, or else takes every processor that the affinity allows.

    Returns:
        The threads it will be.
    """
    most = len(processors())
    if n is None:
        chosen = os.environ.get("NPROC", "")
        return int(chosen) if chosen.isdecimal() and int(chosen) else most
    os.environ["NPROC"] = str(min(n, most))
    return min(n, most)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's features as Linux names them; empty where the system does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return frozenset(word for line in lines for word in line.partition(":")[2].split())


def cpu_name() -> str:
    """Tells processors apart that cannot run each other's code."""
    return " ".join([platform.machine(), platform.processor(), *sorted(cpu_flags())])
