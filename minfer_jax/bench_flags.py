"""The flags of `python -m minfer_jax.bench`, and what they come to."""

from collections.abc import Sequence
from dataclasses import dataclass

from minfer_jax.bench_peer import PACKAGES
from minfer_jax.bench_table import FORMATS
from minfer_jax.context import CHUNK, N_CTX
from minfer_jax.flag_table import Flag, help_rows, read
from minfer_jax.model.precision import PRECISIONS
from minfer_jax.model_flags import help_of
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
        kind=int,
        text=f"positions [max(p, d) + n + 16; with --compile {N_CTX}]",
        least=1,
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
        choices=tuple(CACHE_TYPES),
    ),
    Flag(name="prefill-chunk", kind=int, text="as for generate", default=CHUNK, least=1),
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
        n_ctx: positions of context, or None for what the tests need.
        threads: CPU threads, or None for all.
        precision: "default" or "highest".
        cache_type: of keys and values, or None for what the precision implies.
        prefill_chunk: prompt tokens that are run at once.
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
    draft_ngram: bool = False
    draft: str | None = None
    draft_max: int | None = None

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
    for name in value["vs"]:
        if name not in PACKAGES:
            raise UsageError(
                f"--vs is {name[:40]!r}{did_you_mean(name, PACKAGES)}, expected one of "
                f"{', '.join(PACKAGES)}"
            )
    peers = tuple(dict.fromkeys(value["vs"] + ["llama.cpp"] * bool(value["llama-bench"])))
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
        n_ctx=value["n-ctx"],
        threads=value["threads"],
        precision=value["precision"],
        cache_type=value["cache-type"],
        prefill_chunk=value["prefill-chunk"],
        peers=peers,
        peer_python=value["vs-python"],
        llama_bench=value["llama-bench"],
        compiling=compiling,
        draft_ngram=value["draft-ngram"],
        draft=value["draft"],
        draft_max=value["draft-max"],
    )


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """The numbers of a list, each once."""
    return tuple(dict.fromkeys(_number(flag, part.strip()) for part in text.split(",")))


def _number(flag: str, text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST))
    if not is_number or int(text) > _MOST:
        raise UsageError(f"{flag} has {text[:40]!r}, expected whole numbers from 0 to {_MOST}")
    return int(text)
