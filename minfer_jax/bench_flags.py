"""The flags of `python -m minfer_jax.bench`, and what they come to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_jax.bench_peer import PACKAGES
from minfer_jax.bench_sweep import LAYERS, MOST, Variant, variants
from minfer_jax.bench_table import FORMATS
from minfer_jax.context import CHUNK, N_CTX
from minfer_jax.flag_table import Flag, help_rows, read
from minfer_jax.model.precision import PRECISIONS
from minfer_jax.model_flags import DEVICE_FLAGS, help_of
from minfer_jax.nearest import did_you_mean
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.sources import DEFAULT_MODEL
from minfer_jax.usage import UsageError

REPETITIONS = 5
_MOST = 2**31 - 1  # positions are int32

FLAGS = (
    Flag(
        name="n-prompt",
        kind=str,
        text="prompt tokens, one or more numbers; 0 for none [512]",
        default="512",
        short="p",
    ),
    Flag(
        name="n-gen",
        kind=str,
        text="generated tokens, likewise [128]",
        default="128",
        short="n",
    ),
    Flag(
        name="n-depth",
        kind=str,
        text="tokens that lie before these; prefills begin at 0 [0]",
        default="0",
        short="d",
    ),
    Flag(
        name="repetitions",
        kind=int,
        text=f"that count [{REPETITIONS}; with --compile 1]",
        short="r",
        least=1,
    ),
    Flag(
        name="output",
        kind=str,
        text=f"{', '.join(FORMATS)} [{FORMATS[0]}]",
        default=FORMATS[0],
        short="o",
        choices=FORMATS,
    ),
    Flag(
        name="threads",
        kind=int,
        text="CPU threads [all that the affinity allows]",
        short="t",
        least=1,
    ),
    Flag(
        name="n-ctx",
        kind=str,
        text=f"positions [max(p, d) + n + 16; with --compile {N_CTX}]",
    ),
    Flag(
        name="precision",
        kind=str,
        text="as for generate [default]",
        default="default",
        choices=PRECISIONS,
    ),
    Flag(
        name="cache-type",
        kind=str,
        text="as for generate [f16; at highest f32]",
    ),
    Flag(
        name="layers",
        kind=str,
        text=f"{' or '.join(LAYERS)}; --compile takes several of these: A,B",
    ),
    Flag(name="prefill-chunk", kind=int, text="as for generate", default=CHUNK, least=1),
    *DEVICE_FLAGS,
    Flag(
        name="vs",
        kind=list,
        text=f"run {' or '.join(PACKAGES)} in turn; may be repeated",
    ),
    Flag(name="vs-python", kind=str, text="the Python that has its package [this one]"),
    Flag(name="llama-bench", kind=str, text="be llama.cpp by this program, not a package"),
    Flag(
        name="compile",
        kind=bool,
        text="time the compiling of each program instead",
        default=False,
    ),
    Flag(name="plot", kind=str, text="draw what --compile found, to FILE.png, .svg or .pdf"),
    Flag(name="write", kind=str, text="StableHLO, HLO and memory of each program to this folder"),
    Flag(
        name="draft-ngram",
        kind=bool,
        text="measure instead what guesses win, on -n tokens at most",
        default=False,
    ),
    Flag(name="draft", kind=str, text="the same, of guesses by a smaller model"),
    Flag(
        name="draft-max",
        kind=int,
        text="guesses checked at once [7; of a model 4]",
        least=1,
    ),
)

_TEXT = """\
usage: python -m minfer_jax.bench [flags] [MODEL]

Prefill (pp) and decode (tg) speed, as a table on standard output. MODEL is a
GGUF file, a cached name, or an alias ({aliases}) [{default}].

  python -m minfer_jax.bench smollm2
  python -m minfer_jax.bench smollm2 -p 512,2048 -n 128 -d 0,2048 -o json
  python -m minfer_jax.bench ./model.gguf -p 0 -n 64 -t 1
  python -m minfer_jax.bench smollm2 --vs llama.cpp --vs ik_llama.cpp
  python -m minfer_jax.bench smollm2 --llama-bench ~/llama.cpp/llama-bench
  python -m minfer_jax.bench smollm2 --compile
  python -m minfer_jax.bench smollm2 --compile --n-ctx 1024,4096 --plot cost.png
  python -m minfer_jax.bench smollm2 --draft-ngram -n 256

{flags}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        model: a model reference.
        n_prompt: lengths of the prefill tests; empty for none.
        n_gen: lengths of the decode tests; empty for none.
        depths: how many tokens are in the context when a decode test begins.
        repeat: repetitions that count.
        output: one of FORMATS.
        threads: CPU threads, or None for all.
        precision: "default" or "highest".
        variants: contexts, cache types and forms of layers; several where compiling.
        prefill_chunk: prompt tokens that are run at once.
        device: one of `device.DEVICES`.
        kernels: one of `kernels.CHOICES`.
        steps_per_dispatch: tokens that one call draws, or None for some 40 ms of them.
        peers: names of PACKAGES, each once, in the order given.
        peer_python: the interpreter that has the peers' packages; None for this one.
        llama_bench: a llama-bench program that stands for the package, or None.
        compiling: benchmark compiling in place of running.
        plot: where to draw what that found, or None.
        write: the folder for the programs as texts, or None.
        draft_ngram: measure what guesses from the text win, in place of the tests.
        draft: the same of a draft model, a reference; or None.
        draft_max: guesses that one call checks at most, or None for what is usual.
    """

    model: str
    n_prompt: tuple[int, ...]
    n_gen: tuple[int, ...]
    depths: tuple[int, ...]
    repeat: int
    output: str
    variants: tuple[Variant, ...]
    threads: int | None
    precision: str
    prefill_chunk: int
    peers: tuple[str, ...]
    peer_python: str | None
    llama_bench: str | None
    compiling: bool
    device: str = "auto"
    kernels: str = "auto"
    steps_per_dispatch: int | None = None
    plot: Path | None = None
    write: Path | None = None
    draft_ngram: bool = False
    draft: str | None = None
    draft_max: int | None = None

    @property
    def n_ctx(self) -> int | None:
        """Positions of context of the first variant, or None for what the tests need."""
        return self.variants[0].n_ctx

    @property
    def cache_type(self) -> str | None:
        """Of keys and values of the first variant, or None for what the precision implies."""
        return self.variants[0].cache_type

    @property
    def drafting(self) -> bool:
        """Whether guesses are what is measured."""
        return self.draft_ngram or self.draft is not None


def help_text() -> str:
    """Usage, examples and flags."""
    return help_of(_TEXT, help_rows(FLAGS))


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the program's name, then flags and the model in any order.

    Raises:
        UsageError: a flag is unknown or a value out of its range.
    """
    value, positional = read(FLAGS, argv)
    if len(positional) > 1:
        raise UsageError(f"{len(positional)} models, expected one: {positional[1][:40]!r} is left")
    n_prompt = _numbers("-p", value["n-prompt"])
    n_gen = _numbers("-n", value["n-gen"])
    repeat, compiling = value["repetitions"], value["compile"]
    if not any(n_prompt + n_gen) and not compiling:
        raise UsageError("-p and -n are both 0: there is nothing to measure")
    chosen = [name for one in value["vs"] for name in _names("--vs", one, tuple(PACKAGES))]
    peers = tuple(dict.fromkeys(chosen + ["llama.cpp"] * bool(value["llama-bench"])))
    drafting = value["draft-ngram"] or value["draft"] is not None
    if compiling and peers:
        raise UsageError("--compile times our own compiling: leave out --vs and --llama-bench")
    if drafting and (compiling or peers):
        raise UsageError(
            "--draft and --draft-ngram measure nothing else: leave out --compile, --vs"
        )
    if value["draft-ngram"] and value["draft"] is not None:
        raise UsageError("--draft-ngram and --draft: give one of them")
    if value["draft-max"] is not None and not drafting:
        raise UsageError("--draft-max needs --draft-ngram or --draft: nothing is guessed without")
    if drafting and not any(n_gen):
        raise UsageError("-n is 0: guesses are measured on what is generated")
    return Options(
        model=positional[0] if positional else DEFAULT_MODEL,
        n_prompt=tuple(n for n in n_prompt if n),
        n_gen=tuple(n for n in n_gen if n),
        depths=_numbers("-d", value["n-depth"]),
        repeat=(1 if compiling else REPETITIONS) if repeat is None else repeat,
        output=value["output"],
        variants=_variants(value),
        threads=value["threads"],
        precision=value["precision"],
        prefill_chunk=value["prefill-chunk"],
        device=value["device"],
        kernels=value["kernels"],
        steps_per_dispatch=value["steps-per-dispatch"],
        peers=peers,
        peer_python=value["vs-python"],
        llama_bench=value["llama-bench"],
        compiling=compiling,
        plot=None if value["plot"] is None else Path(value["plot"]),
        write=None if value["write"] is None else _folder(value["write"]),
        draft_ngram=value["draft-ngram"],
        draft=value["draft"],
        draft_max=value["draft-max"],
    )


def _variants(value: dict[str, Any]) -> tuple[Variant, ...]:
    """What is compiled, or run: one variant unless --compile is given."""
    for flag in ("layers", "plot", "write"):
        if value[flag] is not None and not value["compile"]:
            raise UsageError(f"--{flag} needs --compile: nothing else heeds it")
    n_ctx = () if value["n-ctx"] is None else _numbers("--n-ctx", value["n-ctx"], 1)
    found = variants(
        n_ctx,
        _names("--cache-type", value["cache-type"], tuple(CACHE_TYPES)),
        _names("--layers", value["layers"], LAYERS),
    )
    if len(found) > 1 and not value["compile"]:
        raise UsageError("several --n-ctx or --cache-type need --compile: give one of each")
    if len(found) > MOST:
        raise UsageError(f"{len(found)} combinations to compile, expected {MOST} at most")
    return found


def _folder(name: str) -> Path:
    """Where --write goes: a folder, or the name of a new one."""
    if not name or (os.path.exists(name) and not os.path.isdir(name)):
        raise UsageError(f"--write is {name!r}, expected a folder, or the name of a new one")
    return Path(name)


def _names(flag: str, text: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """The names of a list, each once."""
    names = [] if text is None else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(
                f"{flag} is {name[:40]!r}{did_you_mean(name, known)}, expected one of "
                f"{', '.join(known)}"
            )
    return tuple(dict.fromkeys(names))


def _numbers(flag: str, text: str, least: int = 0) -> tuple[int, ...]:
    """The numbers of a list, each once."""
    return tuple(dict.fromkeys(_number(flag, part.strip(), least) for part in text.split(",")))


def _number(flag: str, text: str, least: int) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST))
    if not is_number or not least <= int(text) <= _MOST:
        raise UsageError(
            f"{flag} has {text[:40]!r}, expected whole numbers from {least} to {_MOST}"
        )
    return int(text)
