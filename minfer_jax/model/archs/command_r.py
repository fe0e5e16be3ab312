"""command-r: attention and MLP side by side, layer norms without a bias, scaled logits."""

from minfer_jax.model.archs.base import Arch
from minfer_jax.model.archs.common import with_scaled_logits

ARCH = Arch(
    name="command-r",
    rope_interleaved=True,
    layer_norm=True,
    ffn_norm=None,
    qk_norm="heads",
    optional=frozenset({"attn_q_norm", "attn_k_norm"}),
    adapt=with_scaled_logits,
)
