"""Greedy texts of real models with the kernels and without: equal, or how near the choice was.

At the precision that users have, with the programs that `rates` times: what one part compiles, the
other finds in the compile cache.
"""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

from minfer_jax.context import common_prefix
from minfer_jax.engine import Engine
from minfer_jax.gguf import open_gguf
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.tokenizer import Tokenizer
from scripts.gpu_check import files
from scripts.gpu_check.rows import FAILED, OK, Case, Row, Setting

N_CTX = 1024
N_TOKENS = 48
GAP = 0.1  # of logits: between tokens this near, rounding decides
# Long enough for the largest bucket of a prefill.
STORY = (
    "Once upon a time there was an old lighthouse keeper who lived alone on a small island far "
    "from the coast. Every evening, when the sun went down behind the sea, he climbed the hundred "
    "and twenty steps to the top of the tower, cleaned the great lens with a soft cloth, and lit "
    "the lamp, so that the ships which passed in the dark would know where the rocks were. In all "
    "those years he had never missed a night. One winter, however, a storm came up that was worse "
    "than any he had seen before. The wind tore the shutters from the windows, the waves broke "
    "over the wall of the garden, and in the middle of the night the door flew open. "
)
PROMPTS = (
    "Outside stood",
    "The first thing he did was",
    "Write down, as a list, what he needs to repair:",
)


def cases(setting: Setting) -> list[Case]:
    """A case a model."""
    found = files.models(setting)
    run = functools.partial(_texts, setting)
    cases = [Case(name=path.stem, run=functools.partial(run, path)) for path in found]
    return cases or [files.absent(setting)]


def _texts(setting: Setting, path: Path) -> Iterable[Row]:
    with files.opened(path) as there:
        file = open_gguf(there)
        cfg, params = load_model(file, kernels="xla")
        tokenizer = Tokenizer.from_gguf(file)
    engines = [_engine(cfg, params, tokenizer, choice) for choice in ("xla", "pallas")]
    for prompt in PROMPTS[: 1 if setting.rehearse else None]:
        ids = tokenizer.encode(STORY + prompt)
        plain, got = (
            list(engine.generate_tokens(ids, N_TOKENS, temperature=0.0)) for engine in engines
        )
        yield _compared(f"{path.stem}: ... {prompt}", engines[0], ids, plain, got)


def _engine(cfg: ModelConfig, params: Params, tokenizer: Tokenizer, choice: str) -> Engine:
    arithmetic = dataclasses.replace(cfg.arithmetic, kernels=choice)
    known = min(tokenizer.n_known, cfg.n_vocab)
    chosen = dataclasses.replace(cfg, arithmetic=arithmetic)
    return Engine(params, chosen, n_ctx=N_CTX, n_known=known)


def _compared(name: str, engine: Engine, ids: list[int], plain: list[int], got: list[int]) -> Row:
    """Whether two texts that follow `ids` are equal; if not, what `engine` says where they part."""
    same = common_prefix(plain, got)
    figures: dict[str, float | str] = {"tokens": len(plain), "the same": same}
    if plain == got:
        return Row(name=name, state=OK, figures=figures)
    if same == min(len(plain), len(got)):
        return Row(name=name, state=FAILED, figures=figures, note=f"{len(got)} tokens with kernels")
    logits = engine.logits([*ids, *plain[:same]])[-1]
    gap = float(logits[plain[same]] - logits[got[same]])
    state = OK if abs(gap) <= GAP else FAILED
    note = f"token {plain[same]} by XLA, {got[same]} by the kernels"
    return Row(name=name, state=state, figures={**figures, "logit gap": gap}, note=note)
