"""The flags of `generate` that write down what the model does, instead of running it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_jax.flag_table import Flag
from minfer_jax.usage import UsageError
from minfer_jax.whole_file import check_writable

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
        for flag, path in (("dump-graph", self.dot), ("dump-graph-json", self.json)):
            try:
                if path is not None:
                    check_writable(path)
            except OSError as e:
                raise UsageError(f"--{flag}: cannot write {path}: {e.strerror or e}") from None


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
