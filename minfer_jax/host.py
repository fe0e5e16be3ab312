"""What this machine is, and where the user's cache is."""

import platform
from pathlib import Path

CACHE = "~/.cache/minfer"


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
