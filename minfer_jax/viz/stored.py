"""Trace files: whether one is what it says, before a browser is given it."""

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 2**29


class TraceError(ValueError):
    """A file is no trace, or cannot be shown. One line."""


def check_trace(path: Path) -> None:
    """Read a trace and see that a page can show it.

    Raises:
        TraceError: it cannot be read, is too large, or is no trace.
    """
    try:
        if not path.is_file():
            raise TraceError(f"{path}: no such file, expected a trace")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise TraceError(
                f"{path}: {size / 1e6:.0f} MB, expected at most {MAX_BYTES / 1e6:.0f}: trace a "
                "shorter run"
            )
        data = json.loads(path.read_bytes())
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        if isinstance(e, TraceError):
            raise
        raise TraceError(f"{path}: no JSON, expected a trace ({e})") from None
    if problem := _problem(data):
        raise TraceError(f"{path}: {problem}")


def _problem(data: Any) -> str | None:
    """What is wrong with it."""
    if not isinstance(data, dict) or data.get("format") != "minfer-trace":
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        return f"its format is {str(found)[:40]!r}, expected 'minfer-trace'"
    if data.get("version") != 1:
        return f"a trace of version {str(data.get('version'))[:40]}, expected 1"
    phases = data.get("phases")
    if not isinstance(phases, list) or not all(map(_is_phase, phases)):
        return "its phases are not those of a trace: each has a kind, a graph and steps"
    return None


def _is_phase(phase: Any) -> bool:
    graph = phase.get("graph") if isinstance(phase, dict) else None
    return (
        isinstance(graph, dict)
        and isinstance(phase.get("kind"), str)
        and isinstance(graph.get("nodes"), list)
        and all(isinstance(n, dict) and "id" in n and "name" in n for n in graph["nodes"])
        and isinstance(phase.get("steps"), list)
        and all(isinstance(s, dict) and isinstance(s.get("nodes"), list) for s in phase["steps"])
    )
