"""LoRA adapters as GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

general.type          "adapter"
general.architecture  that of the model
adapter.type          "lora"
adapter.lora.alpha    float32; 0 or none: what a pair adds is not scaled by alpha / R

NAME.lora_a [R, K]    for the tensor NAME [N, K] of the model; of the embedding [V, R]
NAME.lora_b [N, R]                                              of the embedding [D, R]
"""

import fnmatch
import logging
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from minfer_jax import gguf_writer, whole_file
from minfer_jax.gguf import GGUFFile
from minfer_jax.gguf_header import GGUFError, shown
from minfer_jax.model.config import ModelError, listed
from minfer_jax.model.lora import EMBEDDING, Adapter, Pair, Shape
from minfer_jax.model.tensors import Tensors

log = logging.getLogger("minfer_jax")

ENDS = (".lora_a", ".lora_b")
_MAPS = re.compile(
    r"(token_embd|output|blk\.\d+\."
    r"(attn_(q|k|v|qkv|gate|output)|ffn_(gate|up|down)(_shexp)?|ffn_gate_inp))\.weight"
)
_NORM = re.compile(r".*_norm\.weight")  # mergekit adds norms to adapters; llama.cpp skips them


def map_shapes(base: GGUFFile, pattern: str = "*") -> dict[str, Shape]:
    """The maps of a model that an adapter can have pairs for.

    Args:
        base: the model.
        pattern: of their names, as for files: "blk.*.attn_[qv].weight".

    Returns:
        [N, K] by name; of the embedding [V, D].
    """
    return {
        name: (info.shape[0], info.shape[1])
        for name, info in base.tensors.items()
        if _MAPS.fullmatch(name) and len(info.shape) == 2 and fnmatch.fnmatchcase(name, pattern)
    }


def read_lora(file: GGUFFile, base: GGUFFile) -> Adapter:
    """Read an adapter, all of it checked first.

    Args:
        file: an open GGUF file.
        base: the model that it is for.

    Raises:
        ModelError: it is no LoRA adapter, or one for another model, or has pairs that cannot be
            applied. The message begins with the file's path.
    """
    try:
        alpha = _checked_alpha(file, base)
        t = Tensors(file, lambda n: None)
        names = _checked_pairs(t, base)
    except GGUFError as e:  # with its path
        raise ModelError(str(e)) from None
    except ModelError as e:
        raise ModelError(f"{file.path}: {e}") from None
    pairs = {}
    for name in names:
        a, b = (t.vector(name + end) for end in ENDS)
        for end in ENDS:
            file.release(name + end)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ModelError(f"{file.path}: {name} has a pair with values that are not finite")
        pairs[name] = Pair(a=jnp.asarray(a), b=jnp.asarray(b))
    return Adapter(pairs=pairs, alpha=alpha)


def write_lora(path: str | Path, adapter: Adapter, architecture: str) -> None:
    """Write an adapter for this program and llama.cpp; a file that is there is replaced.

    Args:
        path: where to; there is always a whole file, the old or the new.
        adapter: pairs under the names that the model's file has: `map_shapes` gives them.
        architecture: of the model.

    Raises:
        OSError: it cannot be written there.
    """
    import gguf  # takes time to load

    with whole_file.replacing(Path(path)) as file:
        writer = gguf.GGUFWriter(file.name, architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.alpha)
        for name, pair in adapter.pairs.items():
            for end, values in zip(ENDS, (pair.a, pair.b), strict=True):
                writer.add_tensor(name + end, np.asarray(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        gguf_writer.let_others_read(file)


def _checked_alpha(file: GGUFFile, base: GGUFFile) -> float:
    """The adapter's alpha, once its keys are what they should be."""
    expected = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": base.architecture,
    }
    problems = [
        f"{key} is {shown(repr(file.get(key)))}, expected {value!r}"
        for key, value in expected.items()
        if file.get(key) != value
    ]
    if file.get("general.type") != "adapter":
        raise ModelError(f"{problems[0]}: it is no adapter")
    if "adapter.alora.invocation_tokens" in file.metadata:
        problems.append("it counts only from certain tokens on (aLoRA), which is not supported")
    alpha = file.value("adapter.lora.alpha", float, 0.0)
    if not math.isfinite(alpha):
        problems.append(f"adapter.lora.alpha is {alpha}, expected a finite number")
    if problems:
        raise ModelError(listed(problems))
    return alpha


def _checked_pairs(t: Tensors, base: GGUFFile) -> list[str]:
    """The names of maps that have a pair, once all pairs are known to fit."""
    names: dict[str, None] = {}  # in order
    norms = 0
    for name in t.file.tensors:
        stem, dot, end = name.rpartition(".")
        if dot + end in ENDS:
            names[stem] = None
        elif _NORM.fullmatch(name):
            norms += 1
        else:
            t.problems.append(f"tensor '{shown(name)}' ends neither in .lora_a nor in .lora_b")
    shapes = map_shapes(base)
    for name in names:
        _check_pair(t, name, base, shapes.get(name))
    if not names:
        t.problems.append("it has no pairs")
    if t.problems:
        raise ModelError(listed(t.problems))
    if norms:
        log.warning("%s: %d norms in it are left out, as llama.cpp does", t.file.path, norms)
    return list(names)


def _check_pair(t: Tensors, name: str, base: GGUFFile, shape: Shape | None) -> None:
    """Note what is wrong with a pair for a map of this shape."""
    if shape is None:
        there = name in base.tensors
        why = "is none of the maps that can be adapted" if there else "is not in the model"
        experts = ": experts have no pairs here" if there and "_exps." in name else ""
        t.problems.append(f"'{shown(name)}' {why}{experts}")
        return
    missing = [end for end in ENDS if not t.has(name + end)]
    if missing:
        t.problems.append(f"{name}{missing[0]} is missing, the other half of the pair is there")
        return
    n, k = shape
    found = t.file.tensors[f"{name}.lora_b"].shape
    rank = found[-1]
    if rank > min(n, k):
        t.problems.append(f"{name} has a pair of rank {rank}, expected 1 to {min(n, k)}")
        return
    a, b = ((n, rank), (k, rank)) if name == EMBEDDING else ((rank, k), (n, rank))
    t.check(f"{name}.lora_a", a)
    t.check(f"{name}.lora_b", b)
