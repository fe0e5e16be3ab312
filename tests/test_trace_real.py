"""Values of the real SmolLM2 at named points: `pytest -m model`."""

import json
from pathlib import Path

import numpy as np
import pytest

import minfer_jax
from minfer_jax import sources
from minfer_jax.tracing import Trace

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN = json.loads((Path(__file__).parent / "golden/traces/smollm2.json").read_text())
# Largest error of a row's norm, and of its first numbers in units of their root mean square.
# Measured: 1e-5 of exact; of llama.cpp, which rounds activations to 8 bits, 0.16.
BOUNDS = {"exact": 2e-4, "llama.cpp": 0.3}


@pytest.fixture(scope="module")
def trace() -> Trace:
    model = minfer_jax.load(sources.resolve("smollm2"), n_ctx=256, precision="highest")
    found = model.trace(GOLDEN["text"], list(GOLDEN["exact"]))
    assert found.tokens == GOLDEN["tokens"]
    return found


@pytest.mark.parametrize("by", BOUNDS)
def test_values_are_the_reference_s(trace: Trace, by: str):
    assert len(GOLDEN[by]) == 41
    for name, (norm, *first) in GOLDEN[by].items():
        row = trace[name].reshape(len(trace.tokens), -1)[-1]
        error = abs(row[: len(first)] - first).max() / (norm / np.sqrt(len(row)))
        assert max(error, abs(np.linalg.norm(row) / norm - 1)) < BOUNDS[by], name
