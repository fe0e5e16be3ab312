"""What a comparison has found: as tables for a reader, and all of it as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer_jax.bench_table import Columns, render
from minfer_jax.compare_layers import Layers
from minfer_jax.divergence import Positions
from minfer_jax.perplexity import Estimate, Window, estimate
from minfer_jax.tokenizer import Tokenizer

_CONTEXT = 16  # tokens before a position that are looked at for its context
_SHOWN = 32  # characters of it that are shown


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What one model, or A and B, say of one text.

    Attributes:
        models: of each model its name, precision and cache type.
        tokenizer: of the first.
        windows: what was run; all have as many positions.
        positions: of all windows, in order.
        layers: how the residual streams of the first tokens are apart, or None.
    """

    models: Sequence[Mapping[str, str]]
    tokenizer: Tokenizer
    windows: Sequence[Window]
    positions: Positions
    layers: Layers | None

    @property
    def nll(self) -> list[Estimate]:
        """Mean negative log-likelihood of each model, in nats a token."""
        return [estimate(row) for row in self.positions.nll]

    @property
    def targets(self) -> np.ndarray:
        """int32 [n], the token that follows each position."""
        return np.concatenate([window.targets for window in self.windows])

    @property
    def places(self) -> np.ndarray:
        """int64 [n], where in the text each position is."""
        window = self.windows[0]
        starts = np.arange(len(self.windows)) * (len(window.ids) + 1)
        return (starts[:, None] + np.arange(window.first, len(window.ids))[None]).reshape(-1)

    def context(self, index: int) -> str:
        """The end of the text up to a position."""
        number, row = divmod(index, len(self.windows[0].targets))
        window = self.windows[number]
        end = window.first + row + 1
        ids = window.ids[max(0, end - _CONTEXT) : end].tolist()
        return self.tokenizer.decode(ids, skip_special=False, continues=True)

    def token(self, token_id: int) -> str:
        """The text of a token, of a control token its name."""
        return self.tokenizer.decode([int(token_id)], skip_special=False, continues=True)


def as_text(found: Comparison, worst: int) -> str:
    """Tables in Markdown, with a line on what is not in them.

    Args:
        found: the comparison.
        worst: positions to show.
    """
    parts = [_models(found)]
    if len(found.models) == 2:
        parts += [_divergence(found), _agreement(found)]
        if worst:
            parts.append(_worst(found, worst))
        if found.layers is not None:
            parts.append(_layers(found.layers))
    return "\n".join(parts)


def _models(found: Comparison) -> str:
    columns: Columns = {
        "model": lambda r: r["name"],
        "precision": lambda r: r["precision"],
        "cache": lambda r: r["cache_type"],
        "NLL, nats a token": lambda r: _figure(r["nll"], 5),
        "perplexity": lambda r: _figure(r["nll"].perplexity, 4),
    }
    rows = [{**model, "nll": nll} for model, nll in zip(found.models, found.nll, strict=True)]
    n, windows = len(found.positions), len(found.windows)
    note = f"{n} positions" + (f" in {windows} windows" if windows > 1 else "")
    return render(_lettered(rows), columns, "md") + f"\nOver {note}.\n"


def _lettered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two models with A and B before their names."""
    if len(rows) == 1:
        return rows
    return [{**r, "name": f"{x}: {r['name']}"} for x, r in zip("AB", rows, strict=True)]


def _figure(figure: Estimate, digits: int) -> str:
    error = "" if figure.error is None else f" ± {figure.error:.{digits}f}"
    return f"{figure.value:.{digits}f}{error}"


def _divergence(found: Comparison) -> str:
    columns: Columns = {
        "divergence, nats": lambda r: r["name"],
        "mean": lambda r: f"{r['mean']:.2e}",
        "median": lambda r: f"{r['median']:.2e}",
        "99 %": lambda r: f"{r['p99']:.2e}",
        "most": lambda r: f"{r['max']:.2e}",
    }
    names = "KL(A‖B)", "KL(B‖A)"
    rows = [
        {"name": name, **_spread(row)} for name, row in zip(names, found.positions.kl, strict=True)
    ]
    return render(rows, columns, "md")


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p99": float(np.quantile(values, 0.99)),
        "max": float(values.max()),
    }


def _agreement(found: Comparison) -> str:
    top, n = found.positions.top, len(found.positions)
    same = int((top[0] == top[1]).sum())
    apart = estimate(found.positions.nll[1] - found.positions.nll[0])
    return (
        f"The same token is likeliest at {same} of {n} positions ({same / n:.2%}).\n"
        f"The NLL of B less that of A is {_figure(apart, 5)} nats a token.\n"
    )


def _worst(found: Comparison, worst: int) -> str:
    columns: Columns = {
        "worst after": lambda r: r["after"],
        "position": lambda r: str(r["position"]),
        "KL(A‖B)": lambda r: f"{r['kl']:.2e}",
        "the text has": lambda r: r["next"],
        "A says": lambda r: r["a"],
        "B says": lambda r: r["b"],
    }
    return render([_row(found, i) for i in order(found)[:worst]], columns, "md")


def order(found: Comparison) -> list[int]:
    """The positions from the worst on: those where KL(A‖B) is largest."""
    return np.argsort(-found.positions.kl[0], kind="stable").tolist()


def _row(found: Comparison, index: int) -> dict[str, Any]:
    seen = found.positions
    said = [
        f"{found.token(top[index])!r} {prob[index]:.3f}"
        for top, prob in zip(seen.top, seen.top_prob, strict=True)
    ]
    return {
        "after": repr(found.context(index)[-_SHOWN:]),  # a terminal obeys nothing in it
        "position": found.places[index],
        "kl": seen.kl[0, index],
        "next": repr(found.token(found.targets[index])),
        "a": said[0],
        "b": said[1],
    }


def _layers(layers: Layers) -> str:
    columns: Columns = {
        "residual stream": lambda r: r["name"],
        "apart": lambda r: f"{r['apart']:.2e}",
        "added": lambda r: f"{r['added']:+.2e}",
    }
    rows = [
        {"name": name, "apart": mean, "added": added}
        for name, mean, added in zip(layers.names, layers.mean, layers.added, strict=True)
    ]
    text = render(rows, columns, "md")
    if not layers.mean.any():
        return f"{text}\nThey do not part in any layer.\n"
    most = layers.names[layers.parting]
    tokens = layers.apart.shape[1]
    return f"{text}\nThey part most in {most} (|B - A| / |A|, over the first {tokens} tokens).\n"


def as_json(found: Comparison) -> dict[str, Any]:
    """All figures: of the whole, of each position, and of each layer."""
    seen = found.positions
    out: dict[str, Any] = {
        "models": [
            {**model, "nll": _json(nll), "perplexity": _json(nll.perplexity)}
            for model, nll in zip(found.models, found.nll, strict=True)
        ],
        "n_windows": len(found.windows),
        "n_positions": len(seen),
    }
    rows: dict[str, Any] = {
        "position": found.places.tolist(),
        "token": found.targets.tolist(),
        "nll": seen.nll.tolist(),
        "top": seen.top.tolist(),
        "top_prob": seen.top_prob.tolist(),
    }
    if len(found.models) == 2:
        a_b, b_a = seen.kl
        out |= {
            "kl_a_b": _spread(a_b),
            "kl_b_a": _spread(b_a),
            "same_top": float((seen.top[0] == seen.top[1]).mean()),
            "nll_b_less_a": _json(estimate(seen.nll[1] - seen.nll[0])),
        }
        rows |= {"kl_a_b": a_b.tolist(), "kl_b_a": b_a.tolist()}
    if (layers := found.layers) is not None:
        out["layers"] = {
            "names": list(layers.names),
            "apart": layers.mean.tolist(),
            "parting": layers.names[layers.parting],
            "n_tokens": layers.apart.shape[1],
        }
    return out | {"positions": rows}


def _json(figure: Estimate) -> dict[str, float | None]:
    """JSON has no infinity: a perplexity beyond float64 is null."""
    value = figure.value if math.isfinite(figure.value) else None
    return {"value": value, "error": figure.error}
