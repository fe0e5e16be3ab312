"""What may be written down of a run of `generate`. Flags ask for the graph, instead of an answer;
environment variables, those of minfer, for what an answer has gone through:

    MINFER_TRACE=FILE       a trace as JSON, see `trace_file`
    MINFER_GRAPH_DUMP=DIR   little-endian float32, after the prompt (prefill) and the last token
                            (decode): logits_<tag>.f32 [V], of the last row; kv<layer>k_<tag>.f32
                            and kv<layer>v_<tag>.f32 [T, K, H], by position, as the cache has them
    MINFER_TIMING=1         a line about the time that decoding takes
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_jax.flag_table import Flag
from minfer_jax.usage import UsageError
from minfer_jax.whole_file import check_writable

TRACE, DUMP, TIMING = "MINFER_TRACE", "MINFER_GRAPH_DUMP", "MINFER_TIMING"
TAGS = ("prefill", "decode")
LOGITS = "logits_{tag}.f32"
DUMP_FLAGS = (
    Flag(name="dump-graph", kind=str, text="write the traced model's graph here, for Graphviz"),
    Flag(name="dump-graph-json", kind=str, text="write it here as JSON"),
    Flag(
        name="dump-graph-xla",
        kind=bool,
        text="the JSON names what XLA compiles each node to",
        default=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class GraphDump:
    """Where graphs go.

    Attributes:
        dot: a file for Graphviz, or None.
        json: a file for JSON, or None.
        xla: whether the JSON is to name the instructions of the compiled program.
    """

    dot: Path | None
    json: Path | None
    xla: bool

    @property
    def wanted(self) -> bool:
        """Whether there is anything to write."""
        return self.dot is not None or self.json is not None

    def check(self) -> None:
        """See whether the files can be written.

        Raises:
            UsageError: one cannot.
        """
        _check("--dump-graph", self.dot)
        _check("--dump-graph-json", self.json)


def graph_dump(value: dict[str, Any]) -> GraphDump:
    """What these flags ask for.

    Args:
        value: of each of DUMP_FLAGS, by name.

    Raises:
        UsageError: --dump-graph-xla has no file to go to.
    """
    dot, json = value["dump-graph"], value["dump-graph-json"]
    if value["dump-graph-xla"] and json is None:
        raise UsageError("--dump-graph-xla needs --dump-graph-json FILE, where it goes")
    return GraphDump(
        dot=None if dot is None else Path(dot),
        json=None if json is None else Path(json),
        xla=value["dump-graph-xla"],
    )


@dataclass(frozen=True, kw_only=True)
class Dumps:
    """What the environment asks for.

    Attributes:
        trace: a file, or None.
        folder: for logits, keys and values, or None.
        timing: whether a line is wanted.
    """

    trace: Path | None
    folder: Path | None
    timing: bool

    @property
    def wanted(self) -> bool:
        """Whether there is anything to tell."""
        return self.rerun or self.timing

    @property
    def rerun(self) -> bool:
        """Whether the text has to be run once more."""
        return self.trace is not None or self.folder is not None


def asked(environ: Mapping[str, str]) -> Dumps:
    """Read the environment.

    Raises:
        UsageError: a file cannot be written there.
    """
    trace, folder = environ.get(TRACE), environ.get(DUMP)
    found = Dumps(
        trace=Path(trace) if trace else None,
        folder=Path(folder) if folder else None,
        timing=environ.get(TIMING) == "1",
    )
    _check(TRACE, found.trace)
    _check(DUMP, None if found.folder is None else found.folder / LOGITS.format(tag=TAGS[0]))
    return found


def _check(name: str, path: Path | None) -> None:
    try:
        if path is not None:
            check_writable(path)
    except OSError as e:
        raise UsageError(f"{name}: cannot write {path}: {e.strerror or e}") from None
