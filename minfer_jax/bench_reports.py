"""A program on paper: what jax hands to XLA, what XLA makes of it, and the memory it takes."""

from pathlib import Path
from typing import Any

from jax.stages import Compiled, Lowered

from minfer_jax.whole_file import replacing


def write(
    folder: Path, labels: dict[str, Any], name: str, lowered: Lowered, compiled: Compiled
) -> None:
    """Four files for a program, each there whole or not at all.

        smollm2-4096-float16-looped-prefill-512.stablehlo.txt   as jax lowers it
                                               .before.hlo.txt  the same as HLO
                                               .after.hlo.txt   optimised: what is run
                                               .memory.txt      bytes, and XLA's count of its work

    Args:
        folder: where to; made if need be.
        labels: what tells the engine from others; their values stand in the files' names.
        name: of the program.
        lowered, compiled: the program.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "-".join(str(part) for part in (*labels.values(), name)).replace(" ", "-")
    texts = {
        "stablehlo": lowered.as_text(),
        "before.hlo": lowered.as_text(dialect="hlo"),
        "after.hlo": compiled.as_text() or "",
        "memory": _memory(compiled),
    }
    for kind, text in texts.items():
        with replacing(folder / f"{stem}.{kind}.txt", durable=False, shared=True) as file:
            file.write(text.encode())


def _memory(compiled: Compiled) -> str:
    """A line a figure."""
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA says"
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    lines = [f"{kind}_bytes {getattr(memory, f'{kind}_size_in_bytes')}" for kind in kinds]
    work = compiled.cost_analysis() or {}
    lines += [f"{key.replace(' ', '_')} {value:.6g}" for key, value in sorted(work.items())]
    return "\n".join(lines) + "\n"
