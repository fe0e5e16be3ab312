"""The flags of every command that talks to a model, and what they come to."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minfer_jax import flag_table, presets, sources
from minfer_jax.adapter_flags import ADAPTER_FLAGS, control_layers, scales
from minfer_jax.burst import BURST
from minfer_jax.context import CHUNK, MAX_TOKENS, N_CTX
from minfer_jax.device import DEVICES
from minfer_jax.flag_table import Flag
from minfer_jax.model.precision import PRECISIONS
from minfer_jax.prompt_file import STANDARD_INPUT, read_text
from minfer_jax.quant import kernels
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling_flags import (
    SAMPLING_FLAGS,
    STEPS_HELP,
    is_seed_drawn,
    sampling_params,
)
from minfer_jax.usage import UsageError

ANSWER_FLAGS = (
    Flag(
        name="n-predict",
        kind=int,
        text="tokens at most; -1 for all that fit",
        default=MAX_TOKENS,
        short="n",
        least=-1,
        argument="max_tokens",
        main=True,
    ),
    Flag(name="stop", kind=list, text="end before this text; may be repeated", main=True),
    Flag(name="system", kind=str, text="a system message before the prompt", main=True),
    Flag(
        name="file",
        kind=str,
        text="a file that holds the prompt; - is standard input",
        short="f",
        main=True,
    ),
    Flag(
        name="config",
        kind=str,
        text=f"{', '.join(presets.names())}; or FILE.toml",
        main=True,
    ),
)
DEVICE_FLAGS = (
    Flag(
        name="device",
        kind=str,
        text=f"{', '.join(DEVICES)} [auto: a GPU if there is one]",
        default="auto",
        choices=DEVICES,
    ),
    Flag(
        name="kernels",
        kind=str,
        text=f"{', '.join(kernels.CHOICES)} [auto: the device's own]",
        default="auto",
        choices=kernels.CHOICES,
    ),
    Flag(
        name="steps-per-dispatch",
        kind=int,
        text=f"tokens that one call draws, 1 to {BURST} [40 ms of them]",
        least=1,
        most=BURST,
    ),
)
LOAD_FLAGS = (
    Flag(
        name="n-ctx",
        kind=int,
        text="positions of context, prompt included",
        default=N_CTX,
        least=1,
        main=True,
    ),
    Flag(
        name="prefill-chunk",
        kind=int,
        text="prompt tokens that are run at once",
        default=CHUNK,
        least=1,
    ),
    Flag(
        name="threads",
        kind=int,
        text="CPU threads; all if not given",
        short="t",
        least=1,
        main=True,
    ),
    Flag(
        name="precision",
        kind=str,
        text=f"{' or '.join(PRECISIONS)}: float32 throughout, or fast [default]",
        default="default",
        choices=PRECISIONS,
    ),
    Flag(
        name="cache-type",
        kind=str,
        text=f"{', '.join(CACHE_TYPES)} [f16; at highest f32]",
        choices=tuple(CACHE_TYPES),
    ),
    *DEVICE_FLAGS,
    Flag(
        name="meta",
        kind=bool,
        text="show metadata and memory at the start",
        default=False,
        main=True,
    ),
)
MODEL_FLAGS = (*ANSWER_FLAGS, *SAMPLING_FLAGS, *LOAD_FLAGS, *ADAPTER_FLAGS)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model to load and how, and how to draw from it.

    Attributes:
        model: a model reference.
        alone: whether the model is all that was given: it may be meant as a prompt.
        prompt: the words after it, or what a file holds; or None.
        system: a system message, or None.
        sampling: how to draw.
        seed_drawn: whether its seed is one that nobody chose.
        max_tokens: tokens at most; None for as many as the context holds, or without end where
            it shifts.
        stop: strings that end the text.
        n_ctx: positions of context.
        precision: "default" or "highest".
        cache_type: of keys and values, or None for what the precision implies.
        prefill_chunk: prompt tokens that are run at once.
        threads: CPU threads, or None for all.
        device: one of `device.DEVICES`.
        kernels: one of `kernels.CHOICES`.
        steps_per_dispatch: tokens that one call draws, or None for some 40 ms of them.
        meta: show metadata and memory.
        lora, control_vectors: the scale of each, by file.
        control_layers: the first and the last layer that control vectors count in, or None.
    """

    model: str
    alone: bool
    prompt: str | None
    system: str | None
    sampling: SamplingParams
    seed_drawn: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    n_ctx: int
    precision: str
    cache_type: str | None
    prefill_chunk: int
    threads: int | None
    device: str
    kernels: str
    steps_per_dispatch: int | None
    meta: bool
    lora: dict[str, float]
    control_vectors: dict[str, float]
    control_layers: tuple[int, int] | None


def read(table: Sequence[Flag], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read a command line: what a flag says goes before what --config says, and that before all.

    Args, returns and raises: as `flag_table.read`, and UsageError for a preset that is none.
    """
    value, positional = flag_table.read(table, argv)
    if value["config"] is None:
        return value, positional
    try:
        preset = presets.load(value["config"])
    except presets.PresetError as e:
        raise UsageError(f"--config: {e}") from None
    chosen = {**preset.load, **preset.generate}

    def with_default(flag: Flag) -> Flag:
        value = chosen.get(flag.argument or flag.name.replace("-", "_"), flag.default)
        if flag.kind is str and isinstance(value, tuple):
            value = ";".join(value)
        return dataclasses.replace(flag, default=value)

    return flag_table.read([with_default(flag) for flag in table], argv)


def grouped_help(groups: Sequence[tuple[str, Sequence[Flag]]]) -> str:
    """All flags under their titles, the sampler's steps and the presets, for --help-all."""
    parts = [f"{title}:\n{flag_table.help_rows(group)}" for title, group in groups]
    rows = [f"  {name}".ljust(22) + presets.load(name).about for name in presets.names()]
    return "\n\n".join([*parts, STEPS_HELP, "Presets, for --config:\n" + "\n".join(rows)])


def help_of(text: str, rows: str) -> str:
    """A command's help.

    Args:
        text: with places for {aliases} and {default}, the models, and for {flags}.
        rows: what stands for the flags.
    """
    aliases, default = ", ".join(sources.ALIASES), sources.DEFAULT_MODEL
    return text.format(aliases=aliases, default=default, flags=rows)


def model_options(value: dict[str, Any], positional: Sequence[str]) -> ModelOptions:
    """What the flags of MODEL_FLAGS and the positional arguments come to.

    Args:
        value: of each flag, as `flag_table.read` gives it.
        positional: [MODEL] [PROMPT].

    Raises:
        UsageError: a value is out of its range, or the prompt file cannot be used.
    """
    model, prompt = _model_and_prompt(positional)
    if value["file"] is not None:
        if prompt is not None:
            raise UsageError("there are two prompts: give --file or words, not both")
        prompt = None if value["file"] == STANDARD_INPUT else read_text(value["file"])
    return ModelOptions(
        model=model,
        alone=len(positional) == 1 and value["file"] is None,
        prompt=prompt,
        system=None if value["system"] is None else as_text(value["system"]),
        sampling=sampling_params(value),
        seed_drawn=is_seed_drawn(value),
        max_tokens=None if value["n-predict"] < 0 else value["n-predict"],
        stop=tuple(map(as_text, value["stop"])),
        n_ctx=value["n-ctx"],
        precision=value["precision"],
        cache_type=value["cache-type"],
        prefill_chunk=value["prefill-chunk"],
        threads=value["threads"],
        device=value["device"],
        kernels=value["kernels"],
        steps_per_dispatch=value["steps-per-dispatch"],
        meta=value["meta"],
        lora=scales("lora", value["lora"]),
        control_vectors=scales("control-vector", value["control-vector"]),
        control_layers=control_layers(value["control-vector-layer-range"]),
    )


def _model_and_prompt(positional: Sequence[str]) -> tuple[str, str | None]:
    """Words after the model make the prompt; a lone argument with a space is a prompt."""
    words = [as_text(word) for word in positional]
    if not words:
        return sources.DEFAULT_MODEL, None
    if len(words) == 1 and _is_prompt(positional[0]):
        return sources.DEFAULT_MODEL, words[0]
    return positional[0], " ".join(words[1:]) if len(words) > 1 else None


def as_text(word: str) -> str:
    """An argument as text: UTF-8 whatever the locale that Python has read it by."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_prompt(word: str) -> bool:
    """Whether a lone argument is words to answer: no model reference but a path has a space."""
    return " " in word and not word.endswith(".gguf") and not os.path.exists(word)
