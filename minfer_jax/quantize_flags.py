"""The flags of `python -m minfer_jax.quantize`, and what they come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags

from minfer_jax.gguf_types import GGML_TYPES, TYPE_IDS
from minfer_jax.nearest import did_you_mean
from minfer_jax.quant.quantizers import QUANTIZERS
from minfer_jax.quantize_mix import ALIASES, MIXES
from minfer_jax.usage import UsageError, read_flags

_SWITCHES = (
    ("force", "replace OUT if it exists"),
    ("dry-run", "write nothing: show each tensor's type, and the size"),
    ("pure", "the same type for all tensors that are quantised at all"),
)
_TYPES = (
    ("output-type", "of the output layer (also where it is the embedding)"),
    ("embedding-type", "of the token embedding"),
)
_THREADS = ("threads", "CPU threads [all that the affinity allows]")

_TEXT = """\
usage: python -m minfer_jax.quantize [flags] IN OUT TYPE

Makes a smaller GGUF file of a model. IN is a GGUF file, a cached name or an
alias; all parts of a split model become one file. OUT is written under another
name until it is complete.

  python -m minfer_jax.quantize model-F16.gguf model-Q4_K_M.gguf Q4_K_M
  python -m minfer_jax.quantize in.gguf out.gguf Q3_K_S --output-type Q8_0
  python -m minfer_jax.quantize model-F16.gguf Q5_K_M --dry-run | less

TYPE, with the bits of most weights; S, M and L give more bits to few, some and
many other tensors:

{types}

{flags}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        model: a model reference.
        out: path of the new file; None for a dry run.
        mix: a key of MIXES.
        output_type: a key of QUANTIZERS, or None for what the mix has.
        embedding_type: likewise.
        pure: the same type for all.
        force: replace a file that is there.
        threads: CPU threads, or None for all.
    """

    model: str
    out: str | None
    mix: str
    output_type: str | None
    embedding_type: str | None
    pure: bool
    force: bool
    threads: int | None


def help_text() -> str:
    """Usage, examples, types and flags."""
    rows = [f"  --{name}".ljust(22) + text for name, text in (*_TYPES, *_SWITCHES)]
    rows.append(f"  -t, --{_THREADS[0]}".ljust(22) + _THREADS[1])
    by_bits: dict[str, list[str]] = {}
    for name, mix in MIXES.items():
        by_bits.setdefault(mix.most, []).append(name)
    types = [f"  {_bits(most):<8}{' '.join(names)}" for most, names in by_bits.items()]
    return _TEXT.format(types="\n".join(types), flags="\n".join(rows))


def _bits(name: str) -> str:
    kind = GGML_TYPES[TYPE_IDS[name]]
    return f"{kind.block_bytes * 8 / kind.block_size:.4g}"


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the program's name, then flags and positional arguments in any order.

    Raises:
        UsageError: a flag is unknown, an argument is missing, or a value is none that it takes.
    """
    values = flags.FlagValues()
    for name, text in _SWITCHES:
        flags.DEFINE_bool(name, False, text, flag_values=values)
    for name, text in _TYPES:
        flags.DEFINE_string(name, None, text, flag_values=values)
    flags.DEFINE_integer(_THREADS[0], None, _THREADS[1], short_name="t", flag_values=values)
    positional = read_flags(values, argv)
    value: dict[str, Any] = values.flag_values_dict()
    if len(positional) == 2 and value["dry-run"]:
        positional.insert(1, "")
    if len(positional) != 3:
        raise UsageError(
            f"{len(positional)} arguments, expected 3: IN OUT TYPE (--help shows examples)"
        )
    if value["threads"] is not None and value["threads"] < 1:
        raise UsageError(f"--threads is {value['threads']}, expected 1 or more")
    model, out, mix = positional
    return Options(
        model=model,
        out=None if value["dry-run"] else out,
        mix=_one_of("TYPE", ALIASES.get(mix.upper(), mix), MIXES),
        output_type=_type(value, "output-type"),
        embedding_type=_type(value, "embedding-type"),
        pure=value["pure"],
        force=value["force"],
        threads=value["threads"],
    )


def _type(value: dict[str, Any], flag: str) -> str | None:
    name = value[flag]
    return None if name is None else _one_of(f"--{flag}", name, QUANTIZERS)


def _one_of(what: str, name: str, table: dict[str, Any]) -> str:
    if name.upper() not in table:
        meant = did_you_mean(name.upper(), table)
        raise UsageError(f"{what} is {name[:40]!r}{meant}, expected one of {', '.join(table)}")
    return name.upper()
