"""The flags of `python -m minfer_jax.bench`, and what they come to."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from minfer_jax import sources
from minfer_jax.bench_peer import PACKAGES
from minfer_jax.bench_table import FORMATS
from minfer_jax.burst import BURST
from minfer_jax.context import CHUNK, N_CTX
from minfer_jax.device import DEVICES
from minfer_jax.model.precision import PRECISIONS
from minfer_jax.quant import kernels
from minfer_jax.quant.cache import CACHE_TYPES

REPETITIONS = 5
_MOST = 2**31 - 1  # positions are int32
_EXAMPLES = """\
examples:
  python -m minfer_jax.bench smollm2
  python -m minfer_jax.bench smollm2 -p 512,2048 -n 128 -d 0,2048 -o json
  python -m minfer_jax.bench ./model.gguf -p 0 -n 64 -t 1
  python -m minfer_jax.bench smollm2 --vs llama.cpp --vs ik_llama.cpp
  python -m minfer_jax.bench smollm2 --llama-bench ~/llama.cpp/build/bin/llama-bench
  python -m minfer_jax.bench smollm2 --compile
  python -m minfer_jax.bench smollm2 --draft-ngram -n 256
"""


class FlagError(ValueError):
    """A wrong flag or argument. One line."""


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
        n_ctx: positions of context, or None for what the tests need.
        threads: CPU threads, or None for all.
        precision: "default" or "highest".
        cache_type: of keys and values, or None for what the precision implies.
        prefill_chunk: prompt tokens that are run at once.
        device: one of `device.DEVICES`.
        kernels: one of `kernels.CHOICES`.
        steps_per_dispatch: tokens that one call draws, or None for some 40 ms of them.
        peers: names of PACKAGES, each once, in the order given.
        peer_python: the interpreter that has the peers' packages; None for this one.
        llama_bench: a llama-bench program that stands for the package, or None.
        compiling: benchmark compiling in place of running.
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
    n_ctx: int | None
    threads: int | None
    precision: str
    cache_type: str | None
    prefill_chunk: int
    peers: tuple[str, ...]
    peer_python: str | None
    llama_bench: str | None
    compiling: bool
    device: str = "auto"
    kernels: str = "auto"
    steps_per_dispatch: int | None = None
    draft_ngram: bool = False
    draft: str | None = None
    draft_max: int | None = None

    @property
    def drafting(self) -> bool:
        """Whether guesses are what is measured."""
        return self.draft_ngram or self.draft is not None


class _Parser(argparse.ArgumentParser):
    """Argparse that raises FlagError in place of printing usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{' '.join(message.split())} (--help lists the flags)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m minfer_jax.bench",
        description="Prefill (pp) and decode (tg) speed, as a table on standard output.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(*names: str, text: str, **more: object) -> None:
        parser.add_argument(*names, help=text, **more)  # pyright: ignore

    add(
        "model",
        nargs="?",
        default=sources.DEFAULT_MODEL,
        text=f"a GGUF file, a cached name, or an alias ({', '.join(sources.ALIASES)}) "
        f"[{sources.DEFAULT_MODEL}]",
    )
    add("-p", "--n-prompt", metavar="N,..", default="512", text="prompt tokens; 0 for none [512]")
    add("-n", "--n-gen", metavar="N,..", default="128", text="generated tokens; 0 for none [128]")
    add(
        "-d",
        "--n-depth",
        metavar="N,..",
        default="0",
        text="tokens in the context before the generated ones; prefills begin at 0 [0]",
    )
    add("-r", "--repetitions", metavar="N", text=f"[{REPETITIONS}; with --compile 1]")
    add("-o", "--output", choices=FORMATS, default=FORMATS[0], text=f"[{FORMATS[0]}]")
    add("-t", "--threads", metavar="N", text="CPU threads [all that the affinity allows]")
    add(
        "--n-ctx",
        metavar="N",
        text=f"positions of context [max(p, d) + n + 16; with --compile {N_CTX}]",
    )
    add("--precision", choices=PRECISIONS, default="default", text="as for generate [default]")
    add("--cache-type", choices=tuple(CACHE_TYPES), text="as for generate [f16; at highest f32]")
    add("--prefill-chunk", metavar="N", default=str(CHUNK), text=f"as for generate [{CHUNK}]")
    add("--device", choices=DEVICES, default="auto", text="as for generate [auto]")
    add("--kernels", choices=kernels.CHOICES, default="auto", text="as for generate [auto]")
    add("--steps-per-dispatch", metavar="N", text="as for generate [40 ms of them]")
    add(
        "--vs",
        action="append",
        choices=tuple(PACKAGES),
        default=[],
        text="run this in turn, on the same file, and print ratios; may be repeated",
    )
    add("--vs-python", metavar="PATH", text="the Python that has the peer's package [this one]")
    add("--llama-bench", metavar="PATH", text="be llama.cpp by this program, not by a package")
    add("--compile", action="store_true", text="time the compiling of each program instead")
    add(
        "--draft-ngram",
        action="store_true",
        text="measure instead what guesses from the text win, on answers of at most -n tokens",
    )
    add("--draft", metavar="MODEL", text="the same, of guesses by a smaller model")
    add("--draft-max", metavar="N", text="guesses checked at once [7; of a model 4]")
    return parser


def help_text() -> str:
    """Usage, flags and examples."""
    return _parser().format_help()


def parse(argv: Sequence[str]) -> Options | None:
    """Read the command line.

    Args:
        argv: the program's name, then flags and the model in any order.

    Returns:
        The options, or None where help is asked for.

    Raises:
        FlagError: a flag is unknown or a value out of its range.
    """
    if any(word in ("-h", "--help") for word in argv[1:]):
        return None
    value = _parser().parse_intermixed_args(argv[1:])
    n_prompt = _numbers("-p", value.n_prompt, 0)
    n_gen = _numbers("-n", value.n_gen, 0)
    if not any(n_prompt + n_gen) and not value.compile:
        raise FlagError("-p and -n are both 0: there is nothing to measure")
    if value.repetitions is None:
        repeat = 1 if value.compile else REPETITIONS
    else:
        repeat = _number("-r", value.repetitions, 1)
    peers = tuple(dict.fromkeys(value.vs + ["llama.cpp"] * bool(value.llama_bench)))
    steps = value.steps_per_dispatch
    drafting = value.draft_ngram or value.draft is not None
    if value.compile and peers:
        raise FlagError("--compile times our own compiling: leave out --vs and --llama-bench")
    if drafting and (value.compile or peers):
        raise FlagError("--draft and --draft-ngram measure nothing else: leave out --compile, --vs")
    if value.draft_ngram and value.draft is not None:
        raise FlagError("--draft-ngram and --draft are both given: choose one")
    if value.draft_max is not None and not drafting:
        raise FlagError("--draft-max is for --draft-ngram or --draft")
    if drafting and not any(n_gen):
        raise FlagError("-n is 0: guesses are measured on what is generated")
    return Options(
        model=value.model,
        n_prompt=tuple(n for n in n_prompt if n),
        n_gen=tuple(n for n in n_gen if n),
        depths=_numbers("-d", value.n_depth, 0),
        repeat=repeat,
        output=value.output,
        n_ctx=None if value.n_ctx is None else _number("--n-ctx", value.n_ctx, 1),
        threads=None if value.threads is None else _number("-t", value.threads, 1),
        precision=value.precision,
        cache_type=value.cache_type,
        prefill_chunk=_number("--prefill-chunk", value.prefill_chunk, 1),
        device=value.device,
        kernels=value.kernels,
        steps_per_dispatch=None
        if steps is None
        else _number("--steps-per-dispatch", steps, 1, BURST),
        peers=peers,
        peer_python=value.vs_python,
        llama_bench=value.llama_bench,
        compiling=value.compile,
        draft_ngram=value.draft_ngram,
        draft=value.draft,
        draft_max=None if value.draft_max is None else _number("--draft-max", value.draft_max, 1),
    )


def _numbers(flag: str, text: str, least: int) -> tuple[int, ...]:
    """The numbers of a list, each once."""
    return tuple(dict.fromkeys(_number(flag, part, least) for part in text.split(",")))


def _number(flag: str, text: str, least: int, most: int = _MOST) -> int:
    text = text.strip()
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST))
    if not is_number or not least <= int(text) <= most:
        raise FlagError(f"{flag} has {text[:40]!r}, expected whole numbers from {least} to {most}")
    return int(text)
