"""The whole path on the real SmolLM2, fetched on first use: `pytest -m model`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minfer_jax
from minfer_jax import sources
from minfer_jax.language_model import LanguageModel

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

# Greedy continuations by llama.cpp b11434 on this file with float32 arithmetic; the largest logit
# leads by at least 0.05 at every step.
GREEDY = {
    "The capital of France is": (
        [504, 3575, 282, 4649, 314],
        [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216],
    ),
    "def fibonacci(n):\n": (
        [1604, 3987, 46477, 24, 94, 727, 198],
        [
            198,
            1604,
            3987,
            46477,
            24,
            94,
            727,
            472,
            585,
            304,
            10204,
            216,
            33,
            42,
            448,
            1003,
            304,
            472,
        ],
    ),
    "The three laws of thermodynamics are": (
        [504, 1296, 3707, 282, 39361, 359],
        [4959, 3618, 338, 1330, 260, 2555, 282, 2631, 284, 1439, 30, 1216, 3707, 359, 42, 1116, 33],
    ),
}


@pytest.fixture(scope="module")
def path() -> Path:
    return sources.resolve("smollm2")


@pytest.fixture(scope="module", params=["highest", "default"])
def model(request: pytest.FixtureRequest, path: Path) -> LanguageModel:
    return minfer_jax.load(path, n_ctx=256, precision=request.param)


def test_greedy_tokens_are_the_reference_s(model: LanguageModel):
    for text, (ids, expected) in GREEDY.items():
        assert model.tokenizer is not None and model.tokenizer.encode(text) == ids
        assert list(model.generate_tokens(ids, len(expected), temperature=0.0)) == expected
    assert [c.name for c in model.engine.compiles] == ["prefill 32", "decode"]


def test_chunks_and_decode_agree_with_one_prefill(model: LanguageModel):
    ids = GREEDY["The capital of France is"][0] * 8
    whole = model.logits(ids)
    tolerance = 2e-3 if model.cfg.precision == "highest" else 1.0  # of logits around 20
    assert abs(model.logits(ids, chunk=1) - whole).max() < tolerance
    assert abs(model.logits(ids, chunk=7) - whole).max() < tolerance


def test_it_answers(model: LanguageModel):
    answer = model.generate("What is the capital of France?", max_tokens=32, temperature=0.0)
    assert "Paris" in answer
    assert "<|im_end|>" not in answer


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux")
def test_command_within_its_memory(path: Path):
    """Cold, with everything compiled in this process: at most 1.3 times the file and 500 MB."""
    code = (
        "import sys\n"
        "from minfer_jax import generate\n"
        "status = generate.main(['generate', *sys.argv[1:]])\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(next(x.split()[1] for x in lines if x.startswith('VmHWM')), file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    flags = [str(path), "Why is the sky blue?", "-n", "16", "--greedy"]
    environment = {**os.environ, "MINFER_COMPILE_CACHE": "off"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"^Compiled: 2 programs", done.stderr, re.MULTILINE)
    peak = int(done.stderr.strip().splitlines()[-1]) * 1024
    assert peak <= 1.3 * path.stat().st_size + 500e6
