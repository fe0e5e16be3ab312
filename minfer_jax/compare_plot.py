"""A comparison as a picture: how far two models are apart at each position, and in each layer."""

from pathlib import Path

import numpy as np

from minfer_jax.compare_report import Comparison
from minfer_jax.plotting import figure, save

_LEAST = 1e-12  # what a logarithmic axis shows of 0


def draw(found: Comparison, path: Path) -> None:
    """Write a picture.

    Args:
        found: of two models.
        path: the file to write; its ending says the kind.

    Raises:
        OSError: the file cannot be written.
    """
    rows = 1 if found.layers is None else 2
    picture, axes = figure(rows, 1, size=(9.0, 0.4 + 3.0 * rows))
    axes = np.atleast_1d(axes)
    names = [model["name"] for model in found.models]
    picture.suptitle(f"A: {names[0]}    B: {names[1]}", parse_math=False)
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
    save(picture, path)
