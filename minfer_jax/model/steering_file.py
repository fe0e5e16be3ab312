"""Control vectors as GGUF files: one tensor `direction.N` [D] for the residual after layer N.

    general.architecture      "controlvector"
    controlvector.model_hint  of what model, as its maker calls it

Layers are counted from 0, and llama.cpp has none for layer 0 (llama_adapter_cvec::init).
"""

import logging
import re

import numpy as np
from jaxtyping import Float

from minfer_jax.gguf import GGUFFile
from minfer_jax.gguf_header import shown
from minfer_jax.model.config import ModelConfig, ModelError, listed
from minfer_jax.model.tensors import Tensors

log = logging.getLogger("minfer_jax")

_NAME = re.compile(r"direction\.([1-9][0-9]{0,5})")


def read_control_vector(file: GGUFFile, cfg: ModelConfig) -> Float[np.ndarray, "L D"]:
    """Read a control vector, all of it checked first.

    Args:
        file: an open GGUF file.
        cfg: of the model that it is for.

    Returns:
        float32, zeros for the layers that it leaves alone.

    Raises:
        ModelError: it is no control vector, or one for another model. The message begins with the
            file's path.
    """
    found = file.get("general.architecture")
    if found != "controlvector":
        raise ModelError(
            f"{file.path}: general.architecture is {shown(repr(found))}, expected "
            f"'controlvector': it is no control vector"
        )
    t = Tensors(file, lambda n: None)
    layers = {}
    for name in file.tensors:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) >= cfg.n_layer:
            t.problems.append(
                f"tensor '{shown(name)}' is not direction.1 to direction.{cfg.n_layer - 1}"
            )
            continue
        t.check(name, (cfg.n_embd,))
        layers[int(match[1])] = name
    if not file.tensors:
        t.problems.append("it has no tensors")
    if t.problems:
        raise ModelError(f"{file.path}: {listed(t.problems)}")
    hint = file.get("controlvector.model_hint", cfg.arch)
    if hint != cfg.arch:
        log.warning("%s: made for %s, this is %s", file.path, shown(repr(hint)), cfg.arch)
    out = np.zeros((cfg.n_layer, cfg.n_embd), np.float32)
    for layer, name in layers.items():
        out[layer] = t.vector(name)
    if not np.isfinite(out).all():
        raise ModelError(f"{file.path}: it holds values that are not finite")
    return out
