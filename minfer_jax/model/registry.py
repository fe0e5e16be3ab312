"""The architectures that can run. A new one is a file in `archs/` and a row of this table."""

from minfer_jax.model.archs import (
    arcee,
    cohere2,
    command_r,
    ernie4_5,
    ernie4_5_moe,
    exaone,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    granitemoe,
    internlm2,
    llama,
    minicpm,
    mistral3,
    muse_glimmer,
    nemotron,
    olmo2,
    olmoe,
    orion,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    xverse,
)
from minfer_jax.model.archs.base import Arch
from minfer_jax.model.config import ModelError
from minfer_jax.model.keys import shown

ARCHS: dict[str, Arch] = {
    "arcee": arcee.ARCH,
    "cohere2": cohere2.ARCH,
    "command-r": command_r.ARCH,
    "ernie4_5": ernie4_5.ARCH,
    "ernie4_5-moe": ernie4_5_moe.ARCH,
    "exaone": exaone.ARCH,
    "exaone4": exaone4.ARCH,
    "gemma": gemma.ARCH,
    "gemma2": gemma2.ARCH,
    "gemma3": gemma3.ARCH,
    "glm4": glm4.ARCH,
    "gpt-oss": gpt_oss.ARCH,
    "granite": granite.ARCH,
    "granitemoe": granitemoe.ARCH,
    "internlm2": internlm2.ARCH,
    "llama": llama.ARCH,
    "minicpm": minicpm.ARCH,
    "mistral3": mistral3.ARCH,
    "muse-glimmer": muse_glimmer.ARCH,
    "nemotron": nemotron.ARCH,
    "olmo2": olmo2.ARCH,
    "olmoe": olmoe.ARCH,
    "orion": orion.ARCH,
    "phi3": phi3.ARCH,
    "qwen2": qwen2.ARCH,
    "qwen2moe": qwen2moe.ARCH,
    "qwen3": qwen3.ARCH,
    "qwen3moe": qwen3moe.ARCH,
    "seed_oss": seed_oss.ARCH,
    "smollm3": smollm3.ARCH,
    "stablelm": stablelm.ARCH,
    "starcoder2": starcoder2.ARCH,
    "xverse": xverse.ARCH,
}


def find(name: str) -> Arch:
    """The architecture of that name.

    Raises:
        ModelError: there is none; the message lists those that there are.
    """
    if name not in ARCHS:
        raise ModelError(
            f"architecture {shown(name)} is not supported; supported are {', '.join(sorted(ARCHS))}"
        )
    return ARCHS[name]
