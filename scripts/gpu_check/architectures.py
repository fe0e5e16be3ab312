"""Whole models of every architecture at the highest precision: logits by Pallas and by plain XLA.

The models are those of a parity pack, whose reference counts too, or else the tests' tiny ones: of
quantised weights, and wide enough for the kernels.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from minfer_jax.gguf import open_gguf
from minfer_jax.model import kv_state
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.forward import forward
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.model.registry import ARCHS
from scripts.gpu_check import calls
from scripts.gpu_check.rows import FAILED, OK, Case, Row, Setting

LIMIT = 1e-7  # of the squared error over the square of what is expected
REFERENCE_LIMIT = 1e-5  # its GELU comes from a table of float16
N_TOKENS, N_DECODED = 48, 4
N_CTX = 128
# Other formats than Q4_K.
IN_LAYERS, OUTSIDE = {"ffn_down": "Q6_K"}, {"token_embd": "Q8_0", "output": "Q6_K"}
WIDE = {"width": 256, "n_ff": 256, "n_head": 4, "head_dim": 64, "n_vocab": 256}
REHEARSED = ("gemma3",)
FIRST = ("llama", "gemma3", "qwen3", "gpt-oss", "phi3", "gemma2", "qwen2", "mistral3")


def cases(setting: Setting) -> list[Case]:
    """A case a model."""
    if setting.parity is not None:
        paths = sorted((setting.parity / "arch").glob("*.gguf"))
        if not paths:
            raise ValueError(f"{setting.parity}/arch holds no .gguf file")
        return [Case(name=p.stem, run=functools.partial(_of_pack, p)) for p in paths]
    names = REHEARSED if setting.rehearse else tuple(dict.fromkeys((*FIRST, *ARCHS)))
    return [Case(name=name, run=functools.partial(_tiny, name)) for name in names]


def _of_pack(path: Path) -> Iterable[Row]:
    case = np.load(path.with_suffix(".npz"))
    tokens = case["tokens"].tolist()[:N_CTX]
    yield _compared(path.stem, path, tokens, case["logits"])


def _tiny(arch: str) -> Iterable[Row]:
    tokens = np.random.default_rng(0).integers(0, WIDE["n_vocab"], N_TOKENS).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{arch}.gguf"
        path.write_bytes(tiny(arch))
        yield _compared(arch, path, tokens, None)


def tiny(arch: str) -> bytes:
    """A model of the tests, of several formats of 256 columns, as a file's bytes."""
    from tests.helpers.tiny_models import tiny_model  # these need gguf-py, the rest does not
    from tests.helpers.tiny_options import DEFAULTS

    shared = {}
    if "n_ff_shared" in DEFAULTS[arch]:
        n = WIDE["n_ff"]
        shared = {"n_ff_shared": n, "keys": {"expert_shared_feed_forward_length": n}}
    types = {f"blk.{i}.{name}": kind for i in range(5) for name, kind in IN_LAYERS.items()}
    return tiny_model(arch, weight_type="Q4_K", types=types | OUTSIDE, **WIDE, **shared)


def _compared(name: str, path: Path, tokens: list[int], reference: np.ndarray | None) -> Row:
    cfg, params = load_model(open_gguf(path), precision="highest", kernels="xla")
    plain, _ = _logits(params, cfg, tokens)
    arithmetic = dataclasses.replace(cfg.arithmetic, kernels="pallas")
    cfg = dataclasses.replace(cfg, arithmetic=arithmetic, unrolled=True)
    got, traced = _logits(params, cfg, tokens)
    kernels = sum(calls.count(program) for program in traced)
    error = _squared(got, plain)
    figures: dict[str, float] = {"kernels": kernels, "from XLA": error}
    good = error <= LIMIT and kernels > 0
    if reference is not None:
        figures["from the reference"] = off = _squared(got, reference[: len(tokens)])
        good = good and off <= REFERENCE_LIMIT
    note = "" if kernels else "no kernel is in the program: nothing was checked"
    return Row(name=name, state=OK if good else FAILED, figures=figures, note=note)


def _logits(
    params: Params, cfg: ModelConfig, tokens: list[int]
) -> tuple[np.ndarray, list[jax.stages.Traced]]:
    """Logits [T, V] of a prefill and a few decoded tokens, and the two programs."""
    n = len(tokens)
    first = n - N_DECODED
    state = kv_state.init(cfg, N_CTX, chunk=n)
    ids, positions = (jnp.asarray([a], jnp.int32) for a in (tokens, range(n)))
    traced = [
        jax.jit(functools.partial(forward, cfg=cfg, n_out=t), donate_argnums=3).trace(
            params, ids[:, :t], positions[:, :t], state
        )
        for t in (first, 1)
    ]
    prefill, decode = (program.lower().compile() for program in traced)
    logits, state = prefill(params, ids[:, :first], positions[:, :first], state)
    rows = [np.asarray(logits[0])]
    for i in range(first, n):
        logits, state = decode(params, ids[:, i : i + 1], positions[:, i : i + 1], state)
        rows.append(np.asarray(logits[0]))
    return np.concatenate(rows), traced


def _squared(got: np.ndarray, expected: np.ndarray) -> float:
    """The squared error over the square of what is expected; NaN where it is none."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    return float(np.square(a - b).sum() / np.square(b).sum())
