# %% [markdown]
# # 2. Inside a GGUF and its quantisations
#
# A GGUF file is a header of keys and values, a table of tensors, and their bytes. Here it is
# opened, a block of quantised weights is taken apart by hand, and the formats are compared by what
# they lose.

# %%
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np

from minfer_jax import gguf, sources
from minfer_jax.gguf_types import GGML_TYPES, TYPE_IDS
from minfer_jax.quant.qtensor import from_blocks
from minfer_jax.quant.quantizers import dequantize, quantize
from minfer_jax.quant.xla import dequantize as dequantize_planes

file = gguf.open_gguf(sources.resolve("smollm2"))
print(len(file.metadata), "keys,", len(file.tensors), "tensors")

# %% [markdown]
# ## Keys
#
# Everything that a program needs to know is in the file: sizes, the vocabulary, the chat template.

# %%
for key, value in file.metadata.items():
    shown = value if np.isscalar(value) else f"{len(value)} values"
    print(f"{key:42} {str(shown)[:60]!r}")

# %% [markdown]
# ## Tensors
#
# A layer has nine tensors. The small ones, norms, are float32; the maps, where all the bytes are,
# are packed.

# %%
for name, info in file.tensors.items():
    if name.startswith("blk.0."):
        kind = GGML_TYPES[info.ggml_type].name
        print(f"{name:26} {info.shape!s:14} {kind:5} {info.nbytes:>10,} bytes")

# %%
part, kind = Counter(), Counter()
for name, info in file.tensors.items():
    part[name.split(".")[2 if name.startswith("blk.") else 0]] += info.nbytes
    kind[GGML_TYPES[info.ggml_type].name] += info.nbytes

fig, axes = plt.subplots(
    1, 2, figsize=(9, 3), layout="constrained", gridspec_kw={"width_ratios": [3, 1]}
)
for ax, counts in zip(axes, (part, kind), strict=True):
    names, sizes = zip(*counts.most_common()[::-1], strict=True)
    ax.barh(names, np.array(sizes) / 1e6)
    ax.set_xlabel("MB")
axes[0].set_title("by what it is, all layers together", fontsize=10)
axes[1].set_title("by type", fontsize=10)
plt.show()

# %% [markdown]
# ## A block
#
# Most of this file is Q4_1: 32 weights in 20 bytes, five bits a weight.
#
#     [d f16][m f16][16 bytes: low nibbles are weights 0-15, high nibbles 16-31]
#
#     weight = d * q + m,  q = 0 ... 15
#
# The first block of a layer's down map, byte by byte:

# %%
NAME = "blk.0.ffn_down.weight"
raw = file.raw(NAME)  # a view of the mapped file; no copy
block = np.asarray(raw[0, :20])
d, m = block[:4].view("<f2").astype(np.float32)
q = np.concatenate([block[4:] & 15, block[4:] >> 4])
weights = d * q + m

print("bytes", block.tobytes().hex(" "))
print(f"d = {d:.6f}, m = {m:.6f}")
print("q    ", *q)

# %%
fig, axes = plt.subplots(
    2, 1, figsize=(9, 4.2), layout="constrained", gridspec_kw={"height_ratios": [1, 3]}
)
ax = axes[0]
colours = ["tab:orange"] * 2 + ["tab:green"] * 2 + ["tab:blue"] * 16
for i, (byte, colour) in enumerate(zip(block, colours, strict=True)):
    ax.add_patch(plt.Rectangle((i, 0), 1, 1, fc=colour, ec="white", alpha=0.75))
    ax.text(i + 0.5, 0.5, f"{byte:02x}", ha="center", va="center", family="monospace")
for x, word in ((1, "d"), (3, "m"), (12, "two q each")):
    ax.text(x, 1.15, word, ha="center")
ax.set(xlim=(0, 20), ylim=(0, 1.5))
ax.axis("off")

ax = axes[1]
for level in range(16):
    ax.axhline(d * level + m, color="lightgrey", lw=0.8, zorder=0)
ax.axhline(0, color="black", lw=0.8)
ax.vlines(range(32), 0, weights, color="tab:blue")
ax.scatter(range(32), weights, color="tab:blue", zorder=3)
ax.set(xlabel="weight of the block", ylabel="value", xlim=(-0.7, 31.7))
ax.set_title("its weights, on the 16 levels that this block has", fontsize=10)
plt.show()

# %% [markdown]
# The same by the package, and by its planes. In memory a weight is kept as *planes*, one for each
# kind of field, cut into tiles of 16 outputs, so that a register holds a word of 16 rows and a
# product sums across nothing. They are as many bytes as the file's.

# %%
ggml_type = file.tensors[NAME].ggml_type
first = dequantize(block, ggml_type)
packed = from_blocks(raw, ggml_type)
planes = {"bits": packed.bits[0], "scale": packed.scale, "low": packed.low}

print("as read by hand:  ", np.array_equal(first, weights))
print(
    "from the planes:  ",
    np.array_equal(np.asarray(dequantize_planes(packed, np.dtype("f4")))[:32, 0], weights),
)
for name, plane in planes.items():
    print(f"{name:6} {plane.dtype!s:8} {plane.shape} {plane.nbytes:>8,} bytes")
print(f"file                             {raw.nbytes:>8,} bytes")

# %% [markdown]
# ## What is in them
#
# The integers of a whole tensor, and the scales of its blocks. A block spans its own smallest and
# largest weight, so that 0 and 15 are taken in each: hence the two peaks at the ends.

# %%
blocks = np.asarray(raw).reshape(-1, 20)
all_q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
scales = blocks[:, :2].copy().view("<f2").astype(np.float32)[:, 0]
values = dequantize(np.asarray(raw).reshape(-1), ggml_type)

fig, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
axes[0].bar(range(16), np.bincount(all_q.reshape(-1), minlength=16) / all_q.size)
axes[0].set(xlabel="q", ylabel="share", xticks=range(0, 16, 3))
axes[1].hist(scales, bins=80)
axes[1].set(xlabel="d", ylabel="blocks")
axes[2].hist(values, bins=200, density=True)
x = np.linspace(-4, 4, 200) * values.std()
axes[2].plot(x, np.exp(-((x / values.std()) ** 2) / 2) / values.std() / np.sqrt(2 * np.pi), lw=1)
axes[2].set(xlabel="weight", ylabel="density", xlim=(x[0], x[-1]))
axes[2].legend(["normal", "weights"], fontsize=8)
plt.show()
both = np.mean((all_q.min(axis=1) == 0) & (all_q.max(axis=1) == 15))
print(f"{both:.1%} of the blocks hold both a 0 and a 15")
print(f"spread (standard deviation) of the weights: {values.std():.4f}")

# %% [markdown]
# ## What each format loses
#
# The weights in this file have been rounded once; to round them again would flatter Q4_1, which
# would lose nothing. So the formats are given a normal sample of the same spread.
#
# No code can do better on normal weights than the line: an error of 2^-b of the spread at b bits
# (Shannon's rate-distortion bound). A uniform grid of the same bits is some way above it.

# %%
sample = np.random.default_rng(0).normal(0, values.std(), 2**18).astype(np.float32)
FAMILIES = {
    "ternary": ("TQ1_0", "TQ2_0"),
    "a scale a block": ("Q4_0", "Q5_0", "Q8_0"),
    "a scale and a minimum": ("Q4_1", "Q5_1"),
    "scales of scales": ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    "code book": ("MXFP4", "IQ4_XS", "IQ4_NL"),
}
bits, errors = {}, {}
for name in (name for names in FAMILIES.values() for name in names):
    blocks = quantize(sample, name)
    back = dequantize(blocks, TYPE_IDS[name])
    bits[name] = 8 * blocks.nbytes / sample.size
    errors[name] = np.sqrt(np.mean((back - sample) ** 2)) / sample.std()

for name in sorted(bits, key=bits.get):
    print(f"{name:7} {bits[name]:6.3f} bits   error {errors[name]:.4f} of the spread")

# %%
fig, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
ax.plot([1.5, 8.6], [2**-1.5, 2**-8.6], color="grey", lw=1, ls="--", label="no code can be below")
for label, names in FAMILIES.items():
    ax.scatter([bits[n] for n in names], [errors[n] for n in names], label=label)
beside = {"TQ1_0": (-12, -14), "IQ4_XS": (-42, -4), "IQ4_NL": (6, -10), "Q4_K": (-12, -14)}
beside |= {"Q5_K": (-12, -14)}
for name in bits:
    offset = beside.get(name, (5, 4))
    ax.annotate(name, (bits[name], errors[name]), offset, textcoords="offset points", fontsize=8)
ax.set(xlabel="bits a weight", ylabel="error, of the spread", yscale="log")
ax.legend()
plt.show()

# %% [markdown]
# ## What one block does to its weights
#
# The same 64 weights in three formats. Ternary has three levels for a block of 256, and serves
# models that were trained for it; Q4_0 has sixteen levels for a block of 32; at Q8_0 no difference
# shows.

# %%
fig, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained", sharey=True)
few = sample[:256]
for ax, name in zip(axes, ("TQ2_0", "Q4_0", "Q8_0"), strict=True):
    back = dequantize(quantize(few, name), TYPE_IDS[name])
    order = np.argsort(few[:64])
    ax.plot(back[:64][order], drawstyle="steps-mid", label=name)
    ax.plot(few[:64][order], ".", ms=4, color="black", label="before")
    ax.set_xlabel("64 weights, sorted")
    ax.legend(fontsize=8)
axes[0].set_ylabel("value")
plt.show()

# %% [markdown]
# `python -m minfer_jax.quantize` makes whole files of these, each tensor in the type that
# llama.cpp's mixes give it. A new format is one file in `minfer_jax/quant/formats/`.
#
# Next: [the cache](03_kv_cache.ipynb).
