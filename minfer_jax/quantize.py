"""`python -m minfer_jax.quantize IN OUT TYPE`: make the GGUF file that fits.

Standard output carries the table of a dry run alone; everything else goes to standard error.
"""

import math
import os
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tqdm import tqdm

from minfer_jax import host, quantize_file, sources
from minfer_jax.command import guarded, leave, say, with_flags
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.gguf_header import gguf_error, shown
from minfer_jax.gguf_types import GGML_TYPES
from minfer_jax.quant import quantizers
from minfer_jax.quantize_choice import Choice, choose
from minfer_jax.quantize_flags import Options, help_text, parse
from minfer_jax.quantize_mix import MIXES


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and positional arguments.

    Returns:
        The exit status: 0, 1 for a model that cannot be read or a file that cannot be written, 2
        for wrong usage, 130 for Ctrl-C.
    """
    return guarded(lambda: with_flags(argv, help_text, parse, _run))


def _run(options: Options) -> int:
    file = open_gguf(sources.resolve(options.model))
    mix = MIXES[options.mix]
    choices = choose(
        file,
        mix,
        output_type=options.output_type,
        embedding_type=options.embedding_type,
        pure=options.pure,
    )
    _check_readable(file, choices)
    out = None if options.out is None else _check_out(options.out, file, options.force)
    _say_notes(choices)
    size = quantize_file.size(file, choices, mix.file_type)
    if out is None:
        _print_choices(choices)
        _report(file, choices, size)
        return 0
    start = time.perf_counter()
    with tqdm(
        total=sum(c.nbytes for c in choices),
        unit="B",
        unit_scale=True,
        desc="Quantizing",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        quantize_file.write(
            file,
            choices,
            out,
            file_type=mix.file_type,
            threads=min(options.threads or 1 << 16, len(host.processors())),
            on_bytes=bar.update,
        )
    _report(file, choices, size)
    say(f"{out}: {time.perf_counter() - start:.1f} seconds")
    return 0


def _check_readable(file: GGUFFile, choices: Sequence[Choice]) -> None:
    """Refuse a file with types that cannot be changed, before anything is written."""
    changed = [c for c in choices if c.type != c.old]
    bad = {c.old for c in changed if not quantizers.can_dequantize(c.info.ggml_type)}
    if bad:
        raise gguf_error(
            file.path,
            f"has tensors of {', '.join(sorted(bad))}, which cannot be read as floats here; "
            f"quantise the original model",
        )


def _check_out(name: str, file: GGUFFile, force: bool) -> Path:
    """The path that is to be written to, through any link."""
    path = Path(os.path.realpath(name))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise OSError(f"{name}: there is no folder {str(path.parent)!r}") from None
        return path
    if not stat.S_ISREG(mode):
        raise OSError(f"{name} is not a file; give the path of the .gguf file to make")
    if any(path.samefile(part) for part in file.parts):
        raise OSError(f"{name} is the model that is read; give OUT another name")
    if not force:
        raise OSError(f"{name} exists; give another name, or --force to replace it")
    return path


def _say_notes(choices: Sequence[Choice]) -> None:
    again = [c for c in choices if c.type != c.old and GGML_TYPES[c.info.ggml_type].block_size > 1]
    if again:
        say(
            f"note: {len(again)} tensors are quantised already ({_names(c.old for c in again)}); "
            f"what that has lost stays lost: the original model gives a better file"
        )
    other = [c for c in choices if c.type != c.wanted]
    if other:
        say(
            f"note: {len(other)} tensors have rows that no block of "
            f"{_names(c.wanted for c in other)} divides, and take {_names(c.type for c in other)}"
        )


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _print_choices(choices: Sequence[Choice]) -> None:
    names = [shown(c.info.name) for c in choices]
    width = max(map(len, names), default=0)
    for name, c in zip(names, choices, strict=True):
        shape = "x".join(map(str, c.info.shape))
        print(f"{name:<{width}}  {shape:<14}  {c.old:>7}  {c.type:>7}  {c.nbytes:>12}")


def _report(file: GGUFFile, choices: Sequence[Choice], size: int) -> None:
    before = sum(part.stat().st_size for part in file.parts)
    weights = sum(math.prod(c.info.shape) for c in choices)
    say("             bytes       MiB  bits/weight  tensors")
    for name, total, kinds in (
        ("before", before, Counter(c.old for c in choices)),
        ("after", size, Counter(c.type for c in choices)),
    ):
        types = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        bits = total * 8 / max(weights, 1)
        say(f"{name:<6}{total:>12}{total / 2**20:>10.1f}{bits:>13.2f}  {types}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    leave(lambda: main(sys.argv))
