"""The flags of the sampler, by llama.cpp's names, and what they come to."""

import textwrap
from typing import Any

from minfer_jax.flag_table import Flag
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.order import LETTERS, samplers_from
from minfer_jax.sampling.seed import FRESH, settled
from minfer_jax.usage import UsageError


def _flag(name: str, field: str, text: str, *, main: bool = False) -> Flag:
    """The flag of a field of SamplingParams, which has its default."""
    default = getattr(SamplingParams, field)
    kind = type(default)
    return Flag(name=name, kind=kind, text=text, default=default, argument=field, main=main)


SAMPLING_FLAGS = (
    _flag("temp", "temperature", "temperature; 0 takes the likeliest token", main=True),
    Flag(name="greedy", kind=bool, text="the same as --temp 0", default=False, main=True),
    _flag("seed", "seed", "same seed, same text; -1 draws one and tells", main=True),
    _flag("top-k", "top_k", "keep the k likeliest tokens; 0 keeps all", main=True),
    _flag("top-p", "top_p", "keep the likeliest, up to so much; 1 is off", main=True),
    _flag("min-p", "min_p", "drop what is below so much of the top; 0 is off", main=True),
    _flag("repeat-penalty", "repeat_penalty", "weaken recent tokens by it; 1 is off", main=True),
    _flag("repeat-last-n", "penalty_last_n", "how many are recent; -1 is 1024"),
    _flag("frequency-penalty", "frequency_penalty", "taken from their logit, per occurrence"),
    _flag("presence-penalty", "presence_penalty", "taken from their logit, once"),
    _flag("typical", "typical_p", "keep the usual surprises, up to so much; 1 is off"),
    _flag("top-nsigma", "top_n_sigma", "keep logits so near the top one; -1 is off"),
    _flag("xtc-probability", "xtc_probability", "how often the top choices are dropped; 0 is off"),
    _flag("xtc-threshold", "xtc_threshold", "how likely one is; above 0.5 is off"),
    _flag("dynatemp-range", "dynatemp_range", "the temperature moves by so much; 0 is off"),
    _flag("dynatemp-exp", "dynatemp_exponent", "how it follows the entropy"),
    _flag("dry-multiplier", "dry_multiplier", "weaken what would repeat a phrase; 0 is off"),
    _flag("dry-base", "dry_base", "weaker by this for each token of it"),
    _flag("dry-allowed-length", "dry_allowed_length", "so many tokens may be repeated"),
    _flag("dry-penalty-last-n", "dry_penalty_last_n", "how far back it is seen; -1 is 1024"),
    _flag("mirostat", "mirostat", "2: hold the surprise, in place of other steps"),
    _flag("mirostat-ent", "mirostat_tau", "the surprise to hold, in bits"),
    _flag("mirostat-lr", "mirostat_eta", "how fast it is followed"),
    Flag(
        name="samplers",
        kind=str,
        text=f"steps in order, with ';' between, or letters [{''.join(LETTERS)}]",
        argument="samplers",
    ),
)

STEPS_HELP = "Steps, for --samplers, in their usual order:\n" + textwrap.fill(
    ", ".join(f"{letter} {name}" for letter, name in LETTERS.items()),
    initial_indent="  ",
    subsequent_indent="  ",
)
"""What --help-all says of them."""


def sampling_params(value: dict[str, Any]) -> SamplingParams:
    """How to draw.

    Args:
        value: of each of SAMPLING_FLAGS, by name. A seed of -1 is drawn here.

    Raises:
        UsageError: a value is out of its range.
    """
    chosen = {flag.argument: value[flag.name] for flag in SAMPLING_FLAGS if flag.argument}
    try:
        if chosen["samplers"] is None:
            del chosen["samplers"]
        else:
            chosen["samplers"] = samplers_from(chosen["samplers"])
        if value["greedy"]:
            chosen["temperature"] = 0.0
        return SamplingParams(**{**chosen, "seed": settled(chosen["seed"])})
    except ValueError as e:
        field, _, problem = str(e).partition(" ")
        names = {flag.argument: f"--{flag.name}" for flag in SAMPLING_FLAGS}
        raise UsageError(f"{names.get(field, field)} {problem}") from None


def is_seed_drawn(value: dict[str, Any]) -> bool:
    """Whether the seed is one that nobody chose."""
    return value["seed"] == FRESH
