"""A comparison as a picture: how far two models are apart at each position, and in each layer.

matplotlib is loaded when a picture is asked for; the extra `plot` brings it.
"""

from importlib import util
from typing import IO

import numpy as np

from minfer_jax.compare_report import Comparison
from minfer_jax.usage import UsageError

_LEAST = 1e-12  # what a logarithmic axis shows of 0


def check() -> None:
    """UsageError, which says how to install it, if matplotlib is absent."""
    if util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'minfer-jax[plot]'")


def draw(found: Comparison, file: IO[bytes], kind: str) -> None:
    """Write a picture.

    Args:
        found: of two models.
        file: where to.
        kind: "png", "svg" or "pdf".
    """
    from matplotlib.figure import Figure

    names = [model["name"] for model in found.models]
    figure = Figure(figsize=(9, 3.4 if found.layers is None else 6.4), layout="constrained")
    axes = figure.subplots(1 if found.layers is None else 2, squeeze=False)[:, 0]
    figure.suptitle(f"A: {names[0]}    B: {names[1]}", parse_math=False)
    kl = np.maximum(found.positions.kl[0], _LEAST)
    mean = float(found.positions.kl[0].mean())
    axes[0].semilogy(found.places, kl, ".", markersize=3, color="C0")
    axes[0].axhline(max(mean, _LEAST), color="C1", linewidth=1, label=f"mean {mean:.2e}")
    axes[0].set(xlabel="position in the text", ylabel="KL(A‖B), nats")
    axes[0].legend(loc="best")
    if (layers := found.layers) is not None:
        at = np.arange(len(layers.names)) - 1  # the embeddings come before layer 0
        low, high = np.quantile(layers.apart, (0.1, 0.9), axis=1)
        axes[1].fill_between(at, low, high, alpha=0.25, color="C0", label="10 to 90 % of tokens")
        axes[1].plot(at, layers.mean, ".-", color="C0", label="mean")
        axes[1].axvline(at[layers.parting], color="C1", linewidth=1, label="they part most here")
        axes[1].set(xlabel="layer (-1: embeddings)", ylabel="|B - A| / |A|, residual stream")
        axes[1].set_ylim(bottom=0)
        axes[1].legend(loc="best")
    for one in axes:
        one.grid(alpha=0.3)
    figure.savefig(file, format=kind, dpi=144)
