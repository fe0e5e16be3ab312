"""The flags of `python -m minfer_jax.compare`, and what they come to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minfer_jax.bench_texts import PROMPTS
from minfer_jax.context import N_CTX
from minfer_jax.flag_table import Flag, help_rows, read
from minfer_jax.model.precision import PRECISIONS
from minfer_jax.model_flags import DEVICE_FLAGS, as_text, help_of
from minfer_jax.nearest import did_you_mean
from minfer_jax.perplexity import LEAST
from minfer_jax.perplexity import N_CTX as N_WINDOW
from minfer_jax.plotting import ENDINGS
from minfer_jax.prompt_file import read_text
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.quant.kernels import CHOICES
from minfer_jax.usage import UsageError

_BUILT_IN = "\n\n".join(PROMPTS.values())  # code, prose and requests, some 600 tokens
_WORST = 10
# What may follow a model, each after an @.
_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "cache_type": tuple(CACHE_TYPES),
    "kernels": CHOICES,
}

_FLAGS = (
    Flag(name="file", kind=str, text="a text to compare on; - is standard input", short="f"),
    Flag(name="text", kind=str, text="the same, in words"),
    Flag(
        name="perplexity",
        kind=str,
        text="perplexity of this text, as llama.cpp computes it; - as above",
    ),
    Flag(
        name="n-ctx",
        kind=int,
        text=f"tokens of a text that count [{N_CTX}]; of a window of --perplexity [{N_WINDOW}]",
        least=LEAST,
    ),
    Flag(name="chunks", kind=int, text="windows of --perplexity at most [all]", least=1),
    Flag(name="worst", kind=int, text="positions to show", default=_WORST, least=0),
    Flag(name="layers", kind=bool, text="where in the model they part; --nolayers", default=True),
    Flag(name="json", kind=str, text="write all of it into this file, position by position"),
    Flag(name="plot", kind=str, text=f"draw it into this file: {', '.join(ENDINGS)}"),
    Flag(name="threads", kind=int, text="CPU threads; all if not given", short="t", least=1),
    *(flag for flag in DEVICE_FLAGS if flag.name == "device"),
)
_TEXT = """\
usage: python -m minfer_jax.compare [flags] A B
       python -m minfer_jax.compare [flags] MODEL --perplexity FILE

Holds two models, quantisations or precisions against each other on one text:
how far what they say of the next token is apart, at which tokens, and from
which layer on. A is what B is measured by. With --perplexity, the perplexity of
one model, or of both.

A and B are MODEL[@PRECISION][@CACHE][@KERNELS]: a GGUF file, a cached name or
an alias ({aliases}); {precision}; what keys and values are
rounded to, {cache_type}; and the kernels, {kernels}.

  python -m minfer_jax.compare smollm2@highest smollm2
  python -m minfer_jax.compare model-F16.gguf model-Q4_K_M.gguf -f text.txt
  python -m minfer_jax.compare smollm2@f16 smollm2@q8_0 --plot apart.png
  python -m minfer_jax.compare smollm2@xla smollm2
  python -m minfer_jax.compare smollm2 --perplexity text.txt

{flags}
"""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One side of a comparison.

    Attributes:
        name: as it was given.
        model: a model reference.
        precision: "default" or "highest".
        cache_type: of keys and values, or None for what the precision implies.
        kernels: one of `kernels.CHOICES`.
    """

    name: str
    model: str
    precision: str = "default"
    cache_type: str | None = None
    kernels: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        specs: one model, or A and B.
        text: to run.
        perplexity: in windows, as llama.cpp does it.
        n_ctx: tokens of the text, or of a window.
        chunks: windows at most, or None for all.
        worst: positions to show.
        layers: whether to look for the layer where they part.
        json: the file for all figures, or None.
        plot: the file for a picture, or None.
        threads: CPU threads, or None for all.
        device: one of `device.DEVICES`.
    """

    specs: tuple[Spec, ...]
    text: str
    perplexity: bool
    n_ctx: int
    chunks: int | None
    worst: int
    layers: bool
    json: Path | None
    plot: Path | None
    threads: int | None
    device: str


def help_text() -> str:
    """Usage, examples and flags."""
    text = _TEXT
    for kind, words in _CHOICES.items():
        text = text.replace(f"{{{kind}}}", " or ".join((", ".join(words[:-1]), words[-1])))
    return help_of(text, help_rows(_FLAGS))


def parse(argv: Sequence[str]) -> Options:
    """Read the command line, and the text.

    Args:
        argv: the program's name, then flags and models in any order.

    Raises:
        UsageError: a flag is unknown or does not go with the others, a value is none that it takes,
            the number of models is wrong, or the text cannot be read.
    """
    value, positional = read(_FLAGS, argv)
    perplexity = value["perplexity"] is not None
    least = 1 if perplexity else 2
    if not least <= len(positional) <= 2:
        expected = "MODEL, or A B" if perplexity else "A B (one model goes with --perplexity)"
        raise UsageError(f"{len(positional)} models, expected {expected}; --help shows examples")
    if value["chunks"] is not None and not perplexity:
        raise UsageError("--chunks needs --perplexity: other texts are run as a whole")
    if value["plot"] is not None and len(positional) == 1:
        raise UsageError("--plot needs two models: it draws how they differ")
    n_ctx = value["n-ctx"] or (N_WINDOW if perplexity else N_CTX)
    return Options(
        specs=tuple(map(spec, positional)),
        text=_text({name: value[name] for name in ("file", "text", "perplexity")}),
        perplexity=perplexity,
        n_ctx=n_ctx,
        chunks=value["chunks"],
        worst=value["worst"],
        layers=value["layers"] and len(positional) == 2,
        json=None if value["json"] is None else _new_file(value["json"]),
        plot=None if value["plot"] is None else Path(value["plot"]),
        threads=value["threads"],
        device=value["device"],
    )


def spec(name: str) -> Spec:
    """Read MODEL[@PRECISION][@CACHE][@KERNELS]; other words are the reference's: hf:A/B@REVISION.

    Args:
        name: such as "smollm2@highest@f16"; what follows the model in any order.

    Raises:
        UsageError: a word after an @ is none of these, nor a part of the reference.
    """
    model, chosen = name, dict[str, str]()
    while True:
        rest, _, word = model.rpartition("@")
        kind = next((kind for kind, words in _CHOICES.items() if word in words), None)
        if not rest or kind is None or kind in chosen:
            break
        model, chosen[kind] = rest, word
    if rest and word.isidentifier() and not (model.startswith("hf:") or os.path.exists(model)):
        known = [word for words in _CHOICES.values() for word in words]
        raise UsageError(
            f"{name!r}: {word!r} is no precision, cache type or kernels"
            f"{did_you_mean(word, known)}, expected one of {', '.join(known)}"
        )
    return Spec(name=name, model=model, **chosen)


def _text(given: dict[str, str | None]) -> str:
    """The text of the one flag that is given, or the built-in one."""
    flags = [name for name, value in given.items() if value is not None]
    if len(flags) > 1:
        raise UsageError(f"--{' and --'.join(flags)}: give one of them")
    for name in flags:
        value = str(given[name])
        return as_text(value) if name == "text" else read_text(value, "the text file")
    return _BUILT_IN


def _new_file(name: str) -> Path:
    """Where --json goes: a place for a file, told before anything long begins."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"--json: {name!r} {what}; the path of a file is expected")
    return path
