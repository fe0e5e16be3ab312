"""What guesses win: `--draft-ngram` and `--draft MODEL`.

Each prompt of `bench_texts` is answered without guesses and with them, in turn, `repeat` times
after a turn that does not count. In JSON a row says

model, backend, threads, kernels, precision, n_ctx     as in `bench_rows`
test                         name of the prompt, and how its answer was drawn
n_prompt, n_generated        tokens
ts_plain, ts_drafted         tokens a second, medians; of the answer, without the prefill
samples_plain, samples_drafted
ratio                        the median of the turns' ratios
n_drafted, n_accepted        guesses that were checked, and those that were right, in the last turn
same                         whether the tokens were the same in every turn
"""

import statistics
from collections.abc import Callable
from typing import Any

from minfer_jax.bench_table import Columns
from minfer_jax.bench_texts import PROMPTS
from minfer_jax.language_model import LanguageModel

# How answers are drawn: what repeats at all does so greedily.
DRAWS: dict[str, dict[str, Any]] = {
    "": {"temperature": 0.0},
    " t=0.8": {"temperature": 0.8, "seed": 1},
}

COLUMNS: Columns = {
    "model": lambda row: row["model"],
    "test": lambda row: row["test"],
    "prompt": lambda row: str(row["n_prompt"]),
    "answer": lambda row: str(row["n_generated"]),
    "t/s": lambda row: f"{row['ts_plain']:.1f}",
    "with drafts": lambda row: f"{row['ts_drafted']:.1f}",
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "drafted": lambda row: str(row["n_drafted"]),
    "accepted": lambda row: str(row["n_accepted"]),
    "same": lambda row: "yes" if row["same"] else "no",
}


def measure(
    model: LanguageModel,
    drafts: dict[str, Any],
    *,
    n_gen: int,
    repeat: int,
    on_turn: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """One row for each prompt and way to draw.

    Args:
        model: with room for the prompts.
        drafts: `draft_ngram` or `draft`, as for `Engine.generate_tokens`.
        n_gen: tokens of an answer at most.
        repeat: turns that count, at least 1.
        on_turn: called after each.

    Raises:
        ValueError: as of `LanguageModel.stream`.
    """
    rows = []
    for name, prompt in PROMPTS.items():
        ids = model.encode_prompt(prompt)
        for how, sampling in DRAWS.items():
            turns = []
            for _ in range(repeat + 1):
                turns.append([_run(model, ids, n_gen, **sampling, **d) for d in ({}, drafts)])
                on_turn()
            rows.append({"test": name + how, "n_prompt": len(ids), **_row(turns)})
    return rows


def _run(
    model: LanguageModel, ids: list[int], n_gen: int, **options: Any
) -> tuple[list[int], float, int, int]:
    """(tokens, tokens a second, guesses checked, guesses that were right)."""
    assert model.tokenizer is not None, "it has made the prompt"
    stop_ids = model.tokenizer.eog_ids
    tokens = list(model.engine.generate_tokens(ids, n_gen, stop_ids=stop_ids, **options))
    stats = model.stats
    return tokens, stats.decode_rate, stats.n_drafted, stats.n_accepted


def _row(turns: list[list[tuple[list[int], float, int, int]]]) -> dict[str, Any]:
    plain, drafted = zip(*((a[1], b[1]) for a, b in turns[1:]), strict=True)
    tokens, _, n_drafted, n_accepted = turns[-1][1]
    return {
        "n_generated": len(tokens),
        "ts_plain": statistics.median(plain),
        "ts_drafted": statistics.median(drafted),
        "samples_plain": list(plain),
        "samples_drafted": list(drafted),
        "ratio": statistics.median(b / a for a, b in zip(plain, drafted, strict=True)),
        "n_drafted": n_drafted,
        "n_accepted": n_accepted,
        "same": all(run[0] == tokens for turn in turns for run in turn),
    }
