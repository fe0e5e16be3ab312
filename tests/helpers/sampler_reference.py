"""The sampler by the textbook: plain numpy in float64, one row, with loops and sorts.

What was dropped has a logit of -inf. `Doubt` is raised where float32's rounding would decide.
"""

from collections.abc import Collection, Sequence

import numpy as np

from minfer_jax.sampling import SamplingParams

INF = float("inf")
EXTENDED_WINDOW = 1024


class Doubt(Exception):
    """A result hangs on the last bits of a number."""


def by_order(
    logits: np.ndarray,
    recent: Sequence[int],
    params: SamplingParams,
    breakers: Collection[int] = (),
    *,
    xtc_happens: bool = False,
    mu: float = INF,
) -> np.ndarray:
    """Logits after all steps, in the order of `samplers`, with mirostat's rules where it is on.

    Args:
        logits: Any float; NaN counts as dropped.
        recent: Prompt and text so far.
        params: The values.
        breakers: Tokens that break DRY's sequences.
        xtc_happens: Whether the random number is below the probability.
        mu: Mirostat's bound.
    """
    p = params
    x = np.where(np.isnan(logits), -INF, logits).astype(np.float64)
    greedy = p.temperature < 1e-6
    for name in p.samplers:
        if name == "penalties":
            x = penalties(x, recent, p)
        elif name == "dry":
            x = dry(x, recent, p, breakers)
        elif not greedy and not p.mirostat:
            x = _others(name, x, p, xtc_happens)
    if greedy:
        best = int(np.argmax(x))
        return np.where(np.arange(x.size) == best, x, -INF)
    if p.mirostat:
        x = mirostat(x / p.temperature, mu)
    return x


def _others(name: str, x: np.ndarray, p: SamplingParams, xtc_happens: bool) -> np.ndarray:
    match name:
        case "top_n_sigma":
            return top_n_sigma(x, p.top_n_sigma)
        case "top_k":
            return top_k(x, p.top_k)
        case "typ_p":
            return typical(x, p.typical_p)
        case "top_p":
            return top_p(x, p.top_p)
        case "min_p":
            return min_p(x, p.min_p)
        case "xtc":
            on = xtc_happens and p.xtc_probability > 0 and p.xtc_threshold <= 0.5
            return xtc(x, p.xtc_threshold) if on else x
        case _:
            return temperature(x, p)


def softmax(x: np.ndarray) -> np.ndarray:
    """Probabilities of what is left."""
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def _tail(recent: Sequence[int], last_n: int) -> list[int]:
    window = list(recent[-EXTENDED_WINDOW:])
    return window if last_n < 0 else window[len(window) - min(last_n, len(window)) :]


def penalties(x: np.ndarray, recent: Sequence[int], p: SamplingParams) -> np.ndarray:
    """Frequency, presence, then the repeat penalty."""
    x, window = x.copy(), _tail(recent, p.penalty_last_n)
    for token in {t for t in window if 0 <= t < x.size}:
        x[token] -= window.count(token) * p.frequency_penalty + p.presence_penalty
        if p.repeat_penalty > 1:
            x[token] = x[token] * p.repeat_penalty if x[token] <= 0 else x[token] / p.repeat_penalty
    return x


def dry(
    x: np.ndarray, recent: Sequence[int], p: SamplingParams, breakers: Collection[int]
) -> np.ndarray:
    """For each place in the window, how much of the text's end precedes it."""
    window = _tail(recent, p.dry_penalty_last_n)
    n, allowed = len(window), p.dry_allowed_length
    if p.dry_multiplier <= 0 or p.dry_base < 1 or n <= allowed:
        return x
    unbroken = n
    for back, token in enumerate(reversed(window)):
        if token in breakers:
            unbroken = back
            break
    if unbroken < allowed:
        return x
    longest: dict[int, int] = {}
    for place in range(1, n):
        length = 0
        while length < min(place, unbroken) and window[place - 1 - length] == window[-1 - length]:
            length += 1
        longest[window[place]] = max(longest.get(window[place], 0), length)
    x = x.copy()
    for token, length in longest.items():
        if length >= allowed and token not in breakers and 0 <= token < x.size:
            x[token] -= p.dry_multiplier * p.dry_base ** (length - allowed)
    return x


def top_n_sigma(x: np.ndarray, n: float) -> np.ndarray:
    """By numpy's own standard deviation."""
    if n <= 0:
        return x
    alive = x[x > -INF]
    edge = alive.max() - n * alive.std()
    _doubt(np.abs(alive - edge) < 1e-4 * max(1, n))
    return np.where(x >= edge, x, -INF)


def top_k(x: np.ndarray, k: int) -> np.ndarray:
    """Ties of the k-th stay."""
    if not 0 < k < x.size:
        return x
    return np.where(x >= np.sort(x)[::-1][k - 1], x, -INF)


def _up_to(x: np.ndarray, order: np.ndarray, p: float) -> np.ndarray:
    """Keeps the first in an order whose probabilities exceed p."""
    sums = np.cumsum(softmax(x)[order])
    _doubt(np.abs(sums - p) < 1e-5)
    count = int(np.argmax(sums > p)) + 1 if sums[-1] > p else x.size
    kept = np.zeros(x.size, bool)
    kept[order[:count]] = True
    return np.where(kept, x, -INF)


def top_p(x: np.ndarray, p: float) -> np.ndarray:
    """Largest first; of equal ones the lower id."""
    return _up_to(x, np.argsort(-x, kind="stable"), p) if 0 < p < 1 else x


def typical(x: np.ndarray, p: float) -> np.ndarray:
    """Nearest to the entropy first."""
    if not 0 < p < 1:
        return x
    probability = softmax(x)
    alive = probability > 0
    surprise = -np.log(np.where(alive, probability, 1))
    entropy = np.sum(probability * surprise)
    distance = np.where(alive, np.abs(surprise - entropy), INF)
    order = np.argsort(distance, kind="stable")
    kept = _up_to(x, order, p)
    # Two on either side of the entropy, or two of nearly equal logits: which comes first?
    last, first = distance[order][(kept[order] > -INF)], distance[order][(kept[order] == -INF)]
    if first.size and last[-1] < INF:
        gap = first[0] - last[-1]
        _doubt(np.array([gap < 1e-4]))
    return kept


def min_p(x: np.ndarray, p: float) -> np.ndarray:
    """Relative to the largest."""
    if p <= 0:
        return x
    relative = x - x.max() - np.log(min(p, 1))
    _doubt((np.abs(relative) < 1e-5) & (relative != 0))
    return np.where(relative >= 0, x, -INF)


def xtc(x: np.ndarray, threshold: float) -> np.ndarray:
    """All that reach the threshold go, but for the least of them."""
    probability = softmax(x)
    _doubt(np.abs(probability - threshold) < 1e-6)
    likely = (probability >= threshold) & (x > -INF)
    return np.where(x <= x[likely].min(), x, -INF) if likely.any() else x


def temperature(x: np.ndarray, p: SamplingParams) -> np.ndarray:
    """A plain division, or by what the entropy says."""
    alive = x > -INF
    if p.dynatemp_range <= 0 or alive.sum() < 2:
        return x / p.temperature
    probability = softmax(x)
    entropy = -np.sum(probability[probability > 0] * np.log(probability[probability > 0]))
    low, high = max(0, p.temperature - p.dynatemp_range), p.temperature + p.dynatemp_range
    part = entropy / np.log(alive.sum())
    divisor = low + (high - low) * part**p.dynatemp_exponent
    _doubt(np.array([divisor < 0.02]))  # rounding is divided by it as well
    return x / divisor


def mirostat(x: np.ndarray, mu: float) -> np.ndarray:
    """Surprise in bits above the bound goes; the likeliest stay."""
    surprise = -np.log2(np.maximum(softmax(x), 1e-300))
    _doubt(np.abs(surprise - mu) < 1e-4)
    return np.where((surprise <= mu) | (x == x.max()), x, -INF)


def _doubt(doubtful: np.ndarray) -> None:
    if np.any(doubtful):
        raise Doubt
