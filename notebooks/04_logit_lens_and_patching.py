# %% [markdown]
# # 4. Logit lens and activation patching
#
# Every intermediate value of the model has a name. `trace` keeps those that are asked for; `patch`
# puts others in their place, and all that is computed later follows from them. With the two,
# questions can be put to the model: when does it know, where does that come from, what does it do
# if we change it.

# %%
import fnmatch

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import minfer_jax
from minfer_jax import Add, Replace
from minfer_jax.model import kv_state
from minfer_jax.model.traced import forward_traced, gradients

model = minfer_jax.load("smollm2", n_ctx=64, precision="highest", prefill_chunk=16)  # short texts
n_layer, n_head = model.cfg.n_layer, model.cfg.n_head


def words(ids):
    return [model.tokenizer.decode([int(i)]) for i in ids]


# %% [markdown]
# ## Values by name
#
# The names are those of llama.cpp's graphs, a little tidied: `blk.3.attn_out` is what attention
# gives in layer 3, `blk.3.residual` the stream that leaves the layer. A pattern asks for several.

# %%
text = "The capital of France is"
tokens = words(model.tokenizer.encode(text))
trace = model.trace(text, ["embd", "blk.*.residual", "blk.*.weights"])
print(trace)
print(tokens)
for name in ("embd", "blk.0.residual", "blk.0.weights"):
    print(f"{name:16} {trace[name].shape}")
print("next:", words(np.argsort(trace.logits[-1])[::-1][:5]))

# %% [markdown]
# ## Logit lens
#
# The residual stream has the same width everywhere, so the output map can read it at any depth
# (nostalgebraist 2020). In terms of patches: put layer l's residual where that of the last layer
# would be, and look at the logits. The array is data; the 30 runs share one program.

# %%
last = f"blk.{n_layer - 1}.residual"
lens = np.stack(
    [model.patch({last: trace[f"blk.{layer}.residual"]}).logits(text) for layer in range(n_layer)]
)  # L T V
log_p = np.asarray(jax.nn.log_softmax(lens))
print("of the last layer it is the model's own:", np.allclose(lens[-1], trace.logits, atol=1e-3))

# %%
best = lens.argmax(-1)
shown = range(1, n_layer, 2)
fig, ax = plt.subplots(figsize=(8, 6), layout="constrained")
image = ax.imshow(
    np.exp(log_p.max(-1))[list(shown)], aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=1
)
for y, layer in enumerate(shown):
    for x in range(len(tokens)):
        dark = np.exp(log_p[layer, x].max()) > 0.55
        word = words([best[layer, x]])[0].strip() or "␣"
        ax.text(
            x,
            y,
            word[:14],
            ha="center",
            va="center",
            color="white" if dark else "black",
            fontsize=9,
        )
ax.set_xticks(range(len(tokens)), [repr(t) for t in tokens])
ax.set_yticks(range(len(shown)), list(shown))
ax.set(xlabel="after the token", ylabel="layer")
ax.set_title("What the output map reads at each depth, and how likely it is", fontsize=10)
fig.colorbar(image, ax=ax, label="probability")
plt.show()

# %% [markdown]
# The rank of the right answer over the layers, at the last token:

# %%
paris = model.tokenizer.encode(" Paris")[0]
rank = 1 + (lens[:, -1] > lens[:, -1, paris, None]).sum(-1)
fig, ax = plt.subplots(figsize=(8, 2.6), layout="constrained")
ax.plot(rank, marker="o", ms=3)
ax.set(yscale="log", xlabel="layer", ylabel="rank of ' Paris'")
ax.invert_yaxis()
plt.show()
print("it is first from layer", int(np.max(np.nonzero(rank > 1)[0], initial=-1)) + 1)

# %% [markdown]
# ## Where it looks
#
# `weights` are attention's, [heads, tokens, tokens]. The first token takes much of the weight in
# most heads, as somewhere to look when there is nothing to find. For the last row of each head and
# layer, the share that goes to " France":

# %%
france = tokens.index(" France")
share = np.stack([trace[f"blk.{layer}.weights"][:, -1, france] for layer in range(n_layer)])  # L N
first = np.stack([trace[f"blk.{layer}.weights"][:, -1, 0] for layer in range(n_layer)])
fig, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained", sharey=True)
for ax, data, title in zip(axes, (first, share), (tokens[0], tokens[france]), strict=True):
    image = ax.imshow(data, aspect="auto", origin="lower", vmin=0, vmax=1, cmap="magma")
    ax.set(xlabel="head", title=f"weight of {title!r}")
axes[0].set_ylabel("layer")
fig.colorbar(image, ax=axes)
plt.show()
layer, head = np.unravel_index(share.argmax(), share.shape)
print(f"most: layer {layer}, head {head}, {share.max():.0%}")

# %% [markdown]
# ## Patching: where the answer comes from
#
# Two prompts that differ in one word. Take a value of the France run at one layer and one token,
# put it into the Italy run, and see how far the answer moves from Rome to Paris:
#
#     0: no change      1: as in the France run
#
# `Replace` with `where` changes one row and leaves the others. Layer and row are data too.

# %%
other = "The capital of Italy is"
rome = model.tokenizer.encode(" Rome")[0]


def preference(logits):
    """How much likelier Paris is than Rome, in nats."""
    return logits[-1, paris] - logits[-1, rome]


names = ["blk.*.residual", "blk.*.attn_out", "blk.*.down"]
clean, plain = model.trace(text, names), model.trace(other, names)
low, high = preference(plain.logits), preference(clean.logits)
print(f"Italy run {low:+.2f}, France run {high:+.2f}")


def moved(kind):
    """How far the answer moves, for each layer and token: [L, T]."""
    table = np.zeros((n_layer, len(tokens)))
    for layer in range(n_layer):
        name = f"blk.{layer}.{kind}"
        for row in range(france, len(tokens)):  # before it the runs are the same
            where = (np.arange(len(tokens)) == row)[:, None]
            patch = {name: Replace(value=clean[name], where=where)}
            table[layer, row] = (preference(model.patch(patch).logits(other)) - low) / (high - low)
    return table


kinds = {"residual": "residual stream", "attn_out": "attention's output", "down": "MLP's output"}
tables = {kind: moved(kind) for kind in kinds}

# %%
fig, axes = plt.subplots(1, 3, figsize=(10, 5), layout="constrained", sharey=True)
labels = [
    a if a == b else f"{a} /{b}"
    for a, b in zip(tokens, words(model.tokenizer.encode(other)), strict=True)
]
for ax, (kind, title) in zip(axes, kinds.items(), strict=True):
    image = ax.imshow(tables[kind], aspect="auto", origin="lower", cmap="RdBu", vmin=-1, vmax=1)
    ax.set_xticks(range(len(tokens)), labels, rotation=45, ha="right")
    ax.set_title(title, fontsize=10)
axes[0].set_ylabel("layer")
fig.colorbar(image, ax=axes, label="how far from Rome to Paris")
plt.show()

# %%
by_row = tables["residual"]
handed = int(np.argmax(by_row[:, -1] > by_row[:, france]))
print(f"from layer {handed} on the last token's residual matters more than the country's")
for kind in ("attn_out", "down"):
    top = np.unravel_index(np.argsort(tables[kind].ravel())[::-1][:3], tables[kind].shape)
    print(
        kind,
        [f"layer {a}, {tokens[b]!r}: {tables[kind][a, b]:.0%}" for a, b in zip(*top, strict=True)],
    )

# %% [markdown]
# Early on, all depends on the country's own row, and the first MLP there is what makes a country of
# the word. Then, in one layer, attention carries it over to the last row, which is the one that the
# output map reads: it is the layer, and the head, that the picture above has a bright spot for.
#
# ## The same by one derivative
#
# Patching asks what happens if a value is another. A derivative asks it for a small step, of all
# values in one pass: (clean - plain) . d preference / d value is the first-order guess of what each
# patch does (Nanda 2023, attribution patching). Derivatives go through the packed weights.

# %%
ids = jnp.asarray([model.tokenizer.encode(other)], jnp.int32)
positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
slopes = jax.jit(
    lambda params: gradients(
        lambda logits: preference(logits[0]),
        params,
        ids,
        positions,
        kv_state.init(model.cfg, len(tokens)),
        cfg=model.cfg,
        names=names,
    )
)
value, _, slope = slopes(model.params)
guess = {
    kind: np.stack(
        [
            np.sum((clean[n] - plain[n]) * slope[n][0], axis=-1) / (high - low)
            for n in fnmatch.filter(clean, f"blk.*.{kind}")
        ]
    )
    for kind in kinds
}

fig, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
for ax, (kind, title) in zip(axes, kinds.items(), strict=True):
    x, y = tables[kind][:, france:].ravel(), guess[kind][:, france:].ravel()
    ax.axline((0, 0), slope=1, color="grey", lw=0.8)
    ax.scatter(x, y, s=10)
    ax.set(xlabel="patched", title=f"{title}, r = {np.corrcoef(x, y)[0, 1]:.2f}")
    ax.title.set_fontsize(10)
axes[0].set_ylabel("guessed by the derivative")
plt.show()

# %% [markdown]
# ## Steering
#
# A direction that is added to the stream changes what is said. Here it is what praise and complaint
# differ by at one layer, added to the residual of every token (Turner et al. 2023). Text goes on
# greedily; each step is a run of the patched model.

# %%
STREAM = "blk.14.residual"
PRAISE = ("I love this so much, it is wonderful", "What a great film, I enjoyed it")
BLAME = ("I hate this so much, it is terrible", "What a bad film, I disliked it")


def at_the_end(texts):
    return np.mean([model.trace(text, STREAM)[STREAM][-1] for text in texts], axis=0)


direction = at_the_end(PRAISE) - at_the_end(BLAME)


def continued(text, strength, n=12):
    ids = model.tokenizer.encode(text)
    steered = model.patch({STREAM: Add(value=strength * direction)})
    for _ in range(n):
        ids.append(int(steered.logits(ids)[-1].argmax()))
    return model.tokenizer.decode(ids)


for strength in (-1.0, 0.0, 1.0):
    print(f"{strength:+.0f}  {continued('I think the food here is', strength)!r}")

# %% [markdown]
# ## Under jit and vmap
#
# `forward_traced` is the same as a pure function: names and functions are static, arrays may be
# traced. Here one program takes 24 patches at once, each with its own strength.

# %%
strengths = jnp.linspace(-2.0, 2.0, 24)
ids = jnp.asarray([model.tokenizer.encode("I think the food here is")], jnp.int32)
positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
pair = [model.tokenizer.encode(word)[0] for word in (" great", " terrible")]


@jax.jit
def likelihoods(params, strengths):
    def one(strength):
        logits, _, _ = forward_traced(
            params,
            ids,
            positions,
            kv_state.init(model.cfg, ids.shape[1]),
            cfg=model.cfg,
            patches={STREAM: Add(value=strength * direction)},
        )
        return jax.nn.softmax(logits[0, -1])[jnp.asarray(pair)]

    return jax.vmap(one)(strengths)


p = np.asarray(likelihoods(model.params, strengths))
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
ax.plot(strengths, p, label=["' great'", "' terrible'"])
ax.set(xlabel="strength", ylabel="probability", yscale="log", title="I think the food here is ...")
ax.legend()
plt.show()

# %% [markdown]
# Next: [your own sampler](05_your_own_sampler.ipynb).
