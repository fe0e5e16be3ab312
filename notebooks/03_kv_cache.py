# %% [markdown]
# # 3. The KV cache and the two regimes
#
# A model reads a prompt many tokens at a time, and writes one at a time. The first is bound by
# arithmetic, the second by memory. Between the two stands the cache of keys and values.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import minfer_jax
from minfer_jax.model import kv_state
from minfer_jax.model.forward import forward

model = minfer_jax.load("smollm2", n_ctx=4096)
cfg, params = model.cfg, model.params
weights = sum(info.nbytes for info in model.file.tensors.values())

# %% [markdown]
# ## What is kept
#
# Attention at position p looks at the keys and values of all positions up to p. They do not change
# any more, so they are kept:
#
#     keys    [layers, sequences, kv heads, slots, head size]
#     values  the same
#     positions [sequences, slots]: which position each slot holds, -1 for none

# %%
state = kv_state.init(cfg, n_ctx=16)
print("keys", state.k[kv_state.FULL].shape, state.k[kv_state.FULL].dtype)
print("positions", state.positions[kv_state.FULL])

step = jax.jit(forward, static_argnames=("cfg", "n_out"), donate_argnums=3)
ids = jnp.asarray([model.tokenizer.encode("The sea is very deep")], jnp.int32)
positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
_, state = step(params, ids, positions, state, cfg=cfg, n_out=1)
print("after", ids.shape[1], "tokens", state.positions[kv_state.FULL])

# %% [markdown]
# One picture of it: layer 0, the keys of the first head. Rows that nothing was written to are zero.

# %%
keys = np.asarray(state.k[kv_state.FULL][0, 0, 0], np.float32)  # slots, head size
fig, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
image = ax.imshow(
    keys, aspect="auto", cmap="RdBu", vmin=-np.abs(keys).max(), vmax=np.abs(keys).max()
)
ax.set(xlabel="column of the key", ylabel="slot")
fig.colorbar(image, ax=ax)
plt.show()

# %% [markdown]
# ## Nothing is lost by it
#
# The same text in one call and token by token through the cache, in float32: the logits agree but
# for rounding.

# %%
exact = minfer_jax.load("smollm2", n_ctx=64, precision="highest")
text = exact.tokenizer.encode("A cache is a promise that the past will not change.")
whole, single = exact.logits(text), exact.logits(text, chunk=1)
print(
    f"largest logit {np.abs(whole).max():.1f}, "
    f"largest difference {np.abs(whole - single).max():.1e}"
)

# %% [markdown]
# ## What it takes
#
# Bytes of a position: layers x kv heads x (key + value) x bytes of a number. The kv heads are
# shared by three query heads each here, which makes the cache a third of what it would be. Weights
# are constant; the cache grows with the context, and soon it is the larger.

# %%
kinds = {"float32": 4, "float16": 2, "q8_0 (34 bytes for 32)": 34 / 32}
row = cfg.n_layer * cfg.n_head_kv * (cfg.head_dim + cfg.value_dim)
slots = np.arange(0, 8193, 64)

fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
for name, size in kinds.items():
    ax.plot(slots, row * size * slots / 1e6, label=name)
ax.axhline(weights / 1e6, color="grey", ls="--", label="weights")
ax.set(xlabel="positions", ylabel="MB", xlim=(0, 8192))
ax.legend()
plt.show()
n_ctx, kv_bytes = model.engine.n_ctx, model.engine.kv_bytes
print(f"{row * 2} bytes a position in float16; of {n_ctx}: {kv_bytes / 1e6:.0f} MB")
print(f"as many as the weights at {weights / (row * 2):.0f} positions")

# %% [markdown]
# ## Two regimes
#
# One call of `forward` with T tokens. Whatever T is, all weights are read once; the arithmetic is T
# times that of one token. So the time of a call grows more slowly than T while the reading counts,
# and with T when the arithmetic does.


# %%
def seconds(t, repeats=5):
    """Seconds of a call with t tokens, the best of several."""
    ids = jnp.zeros((1, t), jnp.int32)
    positions = jnp.arange(t, dtype=jnp.int32)[None]
    state = kv_state.init(cfg, 1024)
    times = []
    for _ in range(repeats + 1):  # the first compiles
        began = time.perf_counter()
        logits, state = step(params, ids, positions, state, cfg=cfg, n_out=1)
        logits.block_until_ready()
        times.append(time.perf_counter() - began)
    return min(times[1:])


sizes = (1, 4, 16, 64, 256, 512)
took = np.array([seconds(t) for t in sizes])
for t, s in zip(sizes, took, strict=True):
    print(
        f"T = {t:3}   {1e3 * s:7.1f} ms   {t / s:7.0f} tokens/s   "
        f"{weights / s / 1e9:5.1f} GB/s of weights"
    )

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].loglog(sizes, 1e3 * took, marker="o")
axes[0].set(xlabel="tokens a call", ylabel="ms a call")
axes[1].loglog(sizes, sizes / took, marker="o", color="tab:orange")
axes[1].set(xlabel="tokens a call", ylabel="tokens a second")
for ax in axes:
    ax.set_xticks(sizes, sizes)
    ax.set_xticks([], minor=True)
plt.show()
print(
    f"a token costs {took[0] / (took[-1] / sizes[-1]):.0f} times as much alone as among {sizes[-1]}"
)

# %% [markdown]
# A decode step reads all weights for one token, so its ceiling is the memory's speed over their
# size. That is what quantisation buys: fewer bytes, more tokens. (`forward` here is jitted as it
# stands; the engine's decode draws several tokens a call besides.)
#
# ## The longer, the slower
#
# A decode step also reads the keys and values of all positions before it. How fast the engine
# writes after prompts of different length:

# %%
depths = (0, 512, 1024, 2048, 3072)
prompt = np.random.default_rng(0).integers(1000, 40000, depths[-1] + 8).tolist()
rates = []
for depth in depths:
    best = 0.0
    for _ in range(3):
        list(model.generate_tokens(prompt[: depth + 8], 48))
        best = max(best, model.stats.decode_rate)
    rates.append(best)
    print(f"after {depth:4} tokens {rates[-1]:5.0f} tokens/s")

# %%
share = row * 2 * np.array(depths) / (row * 2 * np.array(depths) + weights)
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.plot(depths, rates, marker="o", label="measured, best of three")
ax.plot(depths, rates[0] * (1 - share), ls="--", color="grey", label="if only bytes counted")
ax.set(xlabel="tokens before", ylabel="tokens a second", ylim=(0, None))
ax.legend()
plt.show()

# %% [markdown]
# ## Without a cache
#
# Each token would be a prefill of all before it. With the times measured above (and interpolated
# between), the seconds that an answer of n tokens takes:

# %%
n = np.arange(1, 513)
per_call = np.interp(n, sizes, took)
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.plot(n, np.cumsum(per_call), label="without a cache")
ax.plot(n, n * took[0], label="with one")
ax.set(xlabel="tokens of the answer", ylabel="seconds", yscale="log")
ax.legend()
plt.show()
print(f"512 tokens: {per_call.sum():.0f} s without, {512 * took[0]:.1f} s with")

# %% [markdown]
# ## What was said stays
#
# A prompt that begins as the text before it finds its keys and values still there. The second
# question about a long text therefore starts at once.

# %%
story = "Once there was a lighthouse keeper who collected the names of ships. " * 40
for question in ("Who collected names?", "What did he collect?"):
    model.generate(story + question, max_tokens=8, temperature=0.0)
    stats = model.stats
    print(
        f"{stats.n_prompt} tokens, {stats.n_reused} held, "
        f"first token after {stats.prefill_seconds:.2f} s"
    )

# %% [markdown]
# Next: [what goes on inside](04_logit_lens_and_patching.ipynb).
