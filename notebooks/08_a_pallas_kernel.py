# %% [markdown]
# # 8. Write a Pallas kernel
#
# A product with packed weights, as a kernel: words are read, nibbles are taken out of them,
# multiplied and summed, and no dequantised weight is ever written. Pallas compiles such a kernel
# for a GPU; in interpret mode it runs anywhere, slowly, which is enough to see that it is right.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import minfer_jax
from minfer_jax.quant import xla
from minfer_jax.quant.matmul import EXACT, qmatmul
from minfer_jax.quant.qtensor import from_blocks

model = minfer_jax.load("smollm2", n_ctx=64, precision="highest", prefill_chunk=16)
NAME = "blk.0.ffn_gate.weight"
w = from_blocks(model.file.raw(NAME), model.file.tensors[NAME].ggml_type)
N, K = w.shape
print(w.fmt.name, (N, K))

# %% [markdown]
# ## How the weight lies
#
# Outputs go in tiles of 16, side by side: a row of a plane holds one word for each of them. Columns
# go in units of 32. A unit of Q4_1 is four words, eight nibbles each, and for each output a scale
# and a minimum:
#
#     bits   uint32  [tiles, K / 8,  16]
#     scale  float16 [tiles, K / 32, 16]      weight = scale * q + low
#     low    float16 [tiles, K / 32, 16]
#
# Nibble p of byte b of word i is column 4 (i + 4 p) + b of the unit. So one shift and one mask give
# the same nibble of four bytes, which are four neighbouring columns.

# %%
bits, scale, low = w.bits[0], w.scale, w.low
print("bits", bits.shape, "scale", scale.shape, "low", low.shape)

word, byte, nibble = np.meshgrid(range(4), range(4), range(2), indexing="ij")
column = 4 * (word + 4 * nibble) + byte

fig, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
ax.imshow(column.reshape(4, 8)[:, ::-1], cmap="viridis", aspect="auto")
for i in range(4):
    for j in range(8):
        c = column.reshape(4, 8)[i, 7 - j]
        ax.text(j, i, c, ha="center", va="center", color="black" if c > 16 else "white")
ax.set_xticks(range(8), [f"{28 - 4 * j}" for j in range(8)])
ax.set_yticks(range(4), [f"word {i}" for i in range(4)])
ax.set_xlabel("bit that the nibble begins at, highest first")
ax.set_title("column of each nibble of a unit", fontsize=10)
plt.show()

# %% [markdown]
# ## First in numpy
#
# What is to come out, done with shifts and masks for the whole weight, in float64.

# %%
words = np.asarray(bits).reshape(N // 16, K // 32, 1, 4, 1, 16)  # tile unit p i b lane
shifts = (4 * np.arange(2)[:, None, None, None] + 8 * np.arange(4)[:, None]).astype(np.uint32)
q = (words >> shifts) & np.uint32(15)
q = q.reshape(N // 16, K // 32, 32, 16)
dense = q * np.asarray(scale, np.float64)[:, :, None] + np.asarray(low, np.float64)[:, :, None]
dense = np.moveaxis(dense.reshape(N // 16, K, 16), 1, 2).reshape(N, K)
print(
    "as the package unpacks it:",
    np.array_equal(dense, np.asarray(xla.dequantize(w, jnp.float32)).T),
)

# %% [markdown]
# ## The kernel
#
# One program for each row of x and each tile. It goes through the units, and sums in float32. All
# sizes are powers of two, as Triton wants them. The minimum needs no multiplication for each
# weight:
#
#     sum (scale q + low) x  =  scale sum q x  +  low sum x


# %%
def kernel(x_ref, bits_ref, scale_ref, low_ref, y_ref):
    """y [1, 16] of x [1, K] and the planes of one tile, [1, ..., 16]."""
    shape = (2, 4, 4, 16)  # p i b lane
    p, b = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 2))
    shifts = 4 * p + 8 * b

    def unit(u, total):
        words = bits_ref[0, pl.ds(4 * u, 4), :]
        q = (jnp.broadcast_to(words[None, :, None], shape) >> shifts) & 15
        q = q.reshape(32, 16).astype(jnp.float32)
        x = x_ref[0, pl.ds(32 * u, 32)]
        d, m = (ref[0, u].astype(jnp.float32) for ref in (scale_ref, low_ref))
        return total + d * jnp.sum(q * x[:, None], axis=0) + m * jnp.sum(x)

    y_ref[0] = lax.fori_loop(0, K // 32, unit, jnp.zeros(16, jnp.float32))


def product(x, w, *, interpret):
    """x [M, K] times the packed weight: [M, N]."""
    planes = (w.bits[0], w.scale, w.low)
    tile = [pl.BlockSpec((1, *plane.shape[1:]), lambda m, n: (n, 0, 0)) for plane in planes]
    return pl.pallas_call(
        kernel,
        grid=(len(x), N // 16),
        in_specs=[pl.BlockSpec((1, K), lambda m, n: (m, 0)), *tile],
        out_specs=pl.BlockSpec((1, 16), lambda m, n: (m, n)),
        out_shape=jax.ShapeDtypeStruct((len(x), N), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=1),
        interpret=interpret,
        name="q4_1_product",
    )(x, *planes)


# %% [markdown]
# ## Is it right?
#
# On what the layer is really given: the trace has the normed input of the first MLP, and the gate
# that the model itself made of it.

# %%
trace = model.trace("A kernel is right or it is fast.", ["blk.0.ffn_norm", "blk.0.gate"])
x = jnp.asarray(trace["blk.0.ffn_norm"])  # T K
wanted = np.asarray(x, np.float64) @ dense.T
ways = {
    "this kernel": jax.jit(product, static_argnames="interpret")(x, w, interpret=True),
    "XLA, from packed words": xla.matvec(x, w),
    "XLA, dequantised first": xla.dot(x, xla.dequantize(w, jnp.float32)),
    "the package's choice": qmatmul(x, w, EXACT),
    "in the model's own run": trace["blk.0.gate"],
}
for name, y in ways.items():
    error = np.abs(np.asarray(y, np.float64) - wanted).max() / np.abs(wanted).max()
    print(f"{name:24} largest error {error:.1e} of the largest output")

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
mine = np.asarray(ways["this kernel"])
axes[0].plot(wanted.ravel(), mine.ravel(), ".", ms=1)
axes[0].set(xlabel="float64", ylabel="this kernel", title="outputs")
edges = np.geomspace(1e-10, 1e-6, 60)
for name in ("this kernel", "XLA, from packed words", "XLA, dequantised first"):
    error = np.abs(np.asarray(ways[name], np.float64) - wanted) / np.abs(wanted).max()
    axes[1].hist(error.ravel(), edges, histtype="step", label=name)
axes[1].set(xscale="log", xlabel="error, of the largest output", ylabel="outputs", title="rounding")
axes[1].legend(fontsize=8)
plt.show()

# %% [markdown]
# A test that cannot fail shows nothing. With the two nibbles of a byte exchanged:

# %%
swapped = ((bits & 0x0F0F0F0F) << 4) | ((bits >> 4) & 0x0F0F0F0F)
y = xla.matvec(x, type(w)(fmt=w.fmt, shape=w.shape, bits=(swapped,), scale=scale, low=low))
error = np.abs(np.asarray(y) - wanted).max() / np.abs(wanted).max()
print(f"largest error {error:.2f} of the largest output")

# %% [markdown]
# ## What it is for
#
# A product of one row is bound by memory: these are the bytes that each way has to read for it. The
# interpreter says nothing about time, and no figure of it is given here.

# %%
sizes = {
    "float32": 4 * N * K,
    "bfloat16": 2 * N * K,
    "packed": sum(plane.nbytes for plane in (bits, scale, low)),
}
fig, ax = plt.subplots(figsize=(8, 1.8), layout="constrained")
ax.barh(list(sizes)[::-1], [size / 1e6 for size in sizes.values()][::-1])
ax.set_xlabel("MB read for one row of x")
plt.show()

# %% [markdown]
# ## For a GPU
#
# The same function lowers for CUDA on a machine without one: the program then holds the kernel as
# Triton's intermediate code. That it lowers says nothing yet about how fast it is; that takes a
# device. The kernels that minfer_jax runs on one are in `minfer_jax/pallas/`.

# %%
few = jax.ShapeDtypeStruct((1, K), jnp.float32)
lowered = (
    jax.jit(product, static_argnames="interpret")
    .trace(few, w, interpret=False)
    .lower(lowering_platforms=("cuda",))
)
text = lowered.as_text()
print("the kernel is in the program:", "q4_1_product" in text)
print("as a call of:", "triton" if "triton" in text.lower() else "something else")
