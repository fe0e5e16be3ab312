# %% [markdown]
# # 5. Write your own sampler
#
# A sampler is a pure function of logits and a key. Written as one, it can be jitted, run over
# thousands of keys with vmap, and put into the same program as the model.

# %%
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import minfer_jax
from minfer_jax import sampling
from minfer_jax.model import kv_state
from minfer_jax.model.forward import forward

model = minfer_jax.load("smollm2", n_ctx=256)
params, cfg = model.params, model.cfg
text = "The old man opened the box and found"
ids = model.tokenizer.encode(text)
logits = jnp.asarray(model.logits(ids)[-1])  # V
print(
    logits.shape, "likeliest:", [model.tokenizer.decode([int(i)]) for i in jnp.argsort(-logits)[:6]]
)

# %% [markdown]
# ## A draw is an argmax
#
# Add Gumbel noise to the logits and take the largest: that is a draw from their softmax. So every
# step before it need only say which logits are left, by -inf for the others.


# %%
def draw(logits, key):
    return jnp.argmax(logits + jax.random.gumbel(key, logits.shape))


keys = jax.random.split(jax.random.key(0), 4000)
drawn = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(logits, keys)
p = np.asarray(jax.nn.softmax(logits))
counts = np.bincount(np.asarray(drawn), minlength=p.size) / len(keys)

# %%
top = np.argsort(-p)[:15]
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.bar(range(15), counts[top], label="of 4000 draws")
error = np.sqrt(p[top] * (1 - p[top]) / len(keys))
ax.errorbar(range(15), p[top], 2 * error, fmt=".", color="black", label="softmax, two deviations")
ax.set_xticks(
    range(15), [repr(model.tokenizer.decode([int(i)])) for i in top], rotation=45, ha="right"
)
ax.set_ylabel("share")
ax.legend()
plt.show()

# %% [markdown]
# ## Two filters that are known, and one that is not
#
# min-p keeps what is at least a share of the likeliest. top-p keeps the likeliest tokens that add
# up to p. The third is made up here: keep tokens that are no more surprising than the distribution
# is on average, give or take some nats. Where the model is sure, that is few; where it is not,
# many.


# %%
def min_p(logits, share):
    return jnp.where(logits >= logits.max() + jnp.log(share), logits, -jnp.inf)


def top_p(logits, p):
    order = jnp.argsort(-logits)
    sorted_p = jax.nn.softmax(logits)[order]
    before = jnp.cumsum(sorted_p) - sorted_p  # of all likelier tokens
    return logits.at[order].set(jnp.where(before < p, logits[order], -jnp.inf))


def no_surprise(logits, nats):
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p)
    limit = jnp.maximum(entropy + nats, -log_p.max())  # the likeliest always stays
    return jnp.where(-log_p <= limit, logits, -jnp.inf)


filters = {"min_p": (min_p, 0.05), "top_p": (top_p, 0.9), "no_surprise": (no_surprise, 0.0)}
for name, (keep, value) in filters.items():
    print(f"{name:12} {int((jax.jit(keep)(logits, value) > -jnp.inf).sum()):5} tokens left")

# %% [markdown]
# Filters of a value are functions of it as well, so vmap over the value draws the whole curve. And
# over prompts. Where no word leads, top-p lets in thousands from the tail, each of them unlikely;
# the other two do not.

# %%
prompts = (
    "Two plus two is four, and three plus three is",
    "The capital of the country is",
    "Her favourite word was",
)
rows = jnp.stack([jnp.asarray(model.logits(model.tokenizer.encode(t))[-1]) for t in prompts])
grids = {
    "min_p": np.geomspace(1e-3, 0.9, 40),
    "top_p": np.linspace(0.02, 0.99, 40),
    "no_surprise": np.linspace(-4, 3, 40),
}


@partial(jax.jit, static_argnums=2)
def left(rows, values, keep):
    """How many tokens are left for each row and value."""

    def count(row, value):
        return (keep(row, value) > -jnp.inf).sum()

    return jax.vmap(jax.vmap(count, (None, 0)), (0, None))(rows, values)


fig, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
for ax, (name, (keep, _)) in zip(axes, filters.items(), strict=True):
    curve = left(rows, jnp.asarray(grids[name], jnp.float32), keep)
    ax.plot(
        grids[name], np.asarray(curve).T, label=["... " + " ".join(t.split()[-3:]) for t in prompts]
    )
    ax.set(xlabel=name, yscale="log")
axes[0].set(ylabel="tokens left", xscale="log")
axes[2].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Checked against the package
#
# minfer_jax's own chain with min-p alone must never draw what this one forbids, and should draw all
# that it allows, as often.

# %%
chain = sampling.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.01, repeat_penalty=1.0)
n = 2000
state = jax.tree.map(lambda a: jnp.repeat(a, n, axis=0), sampling.init_state(chain, []))
state = dataclasses.replace(state, step=jnp.arange(n, dtype=jnp.int32))
theirs, _ = jax.jit(sampling.sample)(jnp.tile(logits, (n, 1)), state, chain.arrays(n))


def mine(key):
    return draw(min_p(logits, 0.01), key)


ours = jax.jit(jax.vmap(mine))(keys[:n])
allowed = np.flatnonzero(np.asarray(min_p(logits, 0.01)) > -np.inf)
shares = np.stack(
    [np.bincount(np.asarray(x), minlength=p.size)[allowed] / n for x in (theirs, ours)]
)
print(f"{len(allowed)} tokens allowed")
outside = [int((~np.isin(x, allowed)).sum()) for x in (theirs, ours)]
print(f"drawn outside of them: {outside[0]} by the package, {outside[1]} by ours")
apart = np.abs(shares[0] - shares[1]).max()
print(f"shares differ by at most {apart:.3f}; chance may do {2 / np.sqrt(n):.3f}")

# %% [markdown]
# ## In one program with the model
#
# The whole loop, model and sampler, is one `lax.scan`, and eight texts go side by side: the KV
# state of the prompt is repeated, each row has its own key. Strength and keys are data, so another
# value compiles nothing. A counter in Python counts how often the function is traced.

# %%
ROWS, STEPS = 8, 24
traced = []


@partial(jax.jit, static_argnames=("cfg", "keep"))
def write(params, prompt, keys, value, *, cfg, keep):
    """Texts after a prompt [T], one for each key: [B, STEPS]."""
    traced.append(keep.__name__)
    t, b = len(prompt), len(keys)
    positions = jnp.arange(t, dtype=jnp.int32)[None]
    state = kv_state.init(cfg, t + STEPS, chunk=t)
    logits, state = forward(params, prompt[None], positions, state, cfg=cfg)
    state = kv_state.repeated(state, batch=b)
    logits = jnp.repeat(logits[:, -1], b, axis=0)

    def one(carry, i):
        logits, state = carry
        row_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
        kept = jax.vmap(keep, (0, None))(logits, value)
        token = jax.vmap(draw)(kept, row_keys).astype(jnp.int32)
        at = jnp.full((b, 1), t, jnp.int32) + i
        logits, state = forward(params, token[:, None], at, state, cfg=cfg)
        return (logits[:, -1], state), (token, (kept > -jnp.inf).sum(-1))

    _, (tokens, left) = jax.lax.scan(one, (logits, state), jnp.arange(STEPS, dtype=jnp.int32))
    return tokens.T, left.T


row_keys = jax.random.split(jax.random.key(1), ROWS)
prompt = jnp.asarray(ids, jnp.int32)
for nats in (-2.0, 0.0):
    tokens, left = write(params, prompt, row_keys, nats, cfg=cfg, keep=no_surprise)
    print(f"no_surprise, {nats:+} nats")
    for row in np.asarray(tokens)[:4]:
        print("  ...", model.tokenizer.decode(row.tolist()).replace("\n", " "))
print("traced", len(traced), "time")

# %% [markdown]
# How many tokens each step had to choose from, text by text, and how many different beginnings of
# two tokens there are:

# %%
fig, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
for ax, (name, (keep, value)) in zip(axes, filters.items(), strict=True):
    tokens, left = write(params, prompt, row_keys, value, cfg=cfg, keep=keep)
    ax.plot(np.asarray(left).T, color="tab:blue", alpha=0.3)
    ax.plot(np.median(np.asarray(left), axis=0), color="black", label="median")
    distinct = len({tuple(row[:2]) for row in np.asarray(tokens).tolist()})
    ax.set(yscale="log", xlabel="step", title=f"{name} {value}: {distinct} beginnings of {ROWS}")
    ax.title.set_fontsize(10)
axes[0].set_ylabel("tokens left")
axes[0].legend()
plt.show()

# %% [markdown]
# A step that should be part of every command is one file in `minfer_jax/sampling/` and one row in
# the table of its chain.
#
# Next: [shapes and compiles](06_shapes_and_compiles.ipynb).
