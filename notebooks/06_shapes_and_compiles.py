# %% [markdown]
# # 6. Shapes and compiles
#
# XLA compiles a program for the shapes of its arguments. What is data costs nothing to change; what
# is a shape costs a compile. So the whole art is to make few shapes, and everything else data.

# %%
import os

os.environ["MINFER_COMPILE_CACHE"] = "off"  # here compiles are to be seen, each time

# %%
import time
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import minfer_jax
from minfer_jax.model import kv_state
from minfer_jax.model.forward import forward

model = minfer_jax.load("smollm2", n_ctx=1024)
print("compiled so far:", model.engine.compiles)

# %% [markdown]
# ## The first answer pays
#
# A prompt is padded to a bucket of 32, 128 or 512 tokens, and there is a program for each. A short
# first run needs two: the prefill of its bucket, and decode. The engine keeps a list.

# %%
seen = []


def new_compiles():
    """The programs that were compiled since it was last asked."""
    new = model.engine.compiles[len(seen) :]
    seen.extend(new)
    return ", ".join(f"{c.name} ({c.seconds:.1f} s)" for c in new) or "nothing"


def ask(what, prompt, **options):
    began = time.perf_counter()
    model.generate(prompt, max_tokens=8, template=False, **options)
    took = time.perf_counter() - began
    print(f"{what:38} {took:5.2f} s   compiled: {new_compiles()}")


ask("first prompt", "The sea is")

# %% [markdown]
# ## What is data
#
# Positions, sampler values, seeds, stop strings, biases, the length of what was said before: all of
# them are arguments of the same two programs.

# %%
ask("another prompt", "Mountains are often")
ask("a longer one, in the same bucket", "The river came down from the mountains and ran to the sea")
ask("another temperature, top-k, seed", "The sea is", temperature=1.3, top_k=5, seed=9)
ask("greedy", "The sea is", temperature=0.0)
ask("a stop string", "The sea is", stop="blue")

# %% [markdown]
# ## What is a shape
#
# A longer prompt goes to the next bucket, which is a program of its own: once. The less usual steps
# of the sampler all share one further form of decode; several texts side by side are another shape.

# %%
ask("40 tokens and more: the next bucket", "The sea is wide. " * 12)
ask("again in that bucket", "The land is flat. " * 15)
ask("over 128: the last bucket", "The sea is wide. " * 40)
ask("DRY, mirostat: the extended form", "The sea is", dry_multiplier=0.8)
ask("a bias, which takes that form too", "The sea is", logit_bias={15: -np.inf})

model.generate_many("The sea is", n=4, max_tokens=8)
print("four texts side by side:", new_compiles())

# %%
names, seconds = [c.name for c in seen], [c.seconds for c in seen]
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
ax.barh(names[::-1], seconds[::-1])
ax.set_xlabel("seconds to trace, lower and compile")
plt.show()
print(f"{len(seen)} programs, {sum(seconds):.1f} s in all; the cache on disk saves that next time")

# %% [markdown]
# ## What padding costs
#
# A bucket's rows are computed whether or not they hold a token. Padding stands at position -1, is
# written nowhere and seen by nothing. Fewer buckets mean fewer compiles and more of it:

# %%
n = np.arange(1, 513)
choices = {
    "32, 128, 512": (32, 128, 512),
    "512 alone": (512,),
    "powers of two": tuple(2**i for i in range(10)),
}
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
for label, buckets in choices.items():
    rows = np.array(buckets)[np.searchsorted(buckets, n)]
    ax.step(n, rows, where="post", label=f"{label}: {np.mean(n / rows):.0%} of the rows are tokens")
ax.plot(n, n, color="grey", lw=0.8, ls="--")
ax.set(xlabel="tokens of the prompt", ylabel="rows that are computed")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Counting traces yourself
#
# Python in a jitted function runs when it is traced, and only then. So a counter in it tells each
# compile. The naive loop gives the whole text at each step, one token longer than before:

# %%
params, cfg = model.params, model.cfg
traces = Counter()


@partial(jax.jit, static_argnames="cfg")
def naive(params, ids, *, cfg):
    """The next token of a text [T], from scratch."""
    traces["naive"] += 1
    t = ids.shape[0]
    positions = jnp.arange(t, dtype=jnp.int32)[None]
    logits, _ = forward(params, ids[None], positions, kv_state.init(cfg, t, chunk=t), cfg=cfg)
    return jnp.argmax(logits[0, -1]).astype(jnp.int32)


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def fixed(params, token, position, state, *, cfg):
    """The next token, of one token and a cache whose shape never changes."""
    traces["fixed"] += 1
    logits, state = forward(params, token[None, None], position[None, None], state, cfg=cfg)
    return jnp.argmax(logits[0, -1]).astype(jnp.int32), state


prompt = model.tokenizer.encode("The sea is")
STEPS = 5
times = {"naive": [], "fixed": []}
text = list(prompt)
for _ in range(STEPS):
    began = time.perf_counter()
    text.append(int(naive(params, jnp.asarray(text, jnp.int32), cfg=cfg)))
    times["naive"].append(time.perf_counter() - began)

state, other = kv_state.init(cfg, 64), list(prompt)
for at in range(len(prompt) + STEPS - 1):
    began = time.perf_counter()
    token, state = fixed(params, jnp.int32(other[at]), jnp.int32(at), state, cfg=cfg)
    follows = int(token)  # waits for it
    if at + 1 == len(other):
        other.append(follows)
    times["fixed"].append(time.perf_counter() - began)

print("the same tokens:", text == other)
print("traced:", dict(traces))

# %%
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
for name, own in times.items():
    ax.plot(range(1, len(own) + 1), own, marker="o", label=f"{name}, traced {traces[name]} x")
ax.set(yscale="log", xlabel="call", ylabel="seconds")
ax.legend()
plt.show()

# %% [markdown]
# ## Weights are arguments too
#
# A weight that a jitted function closes over becomes a constant of the program: it is compiled anew
# for other weights, and takes its bytes a second time. Given as an argument, a program serves all
# weights of these shapes. What the compiler says of the program above (the embedding counts twice,
# as it is the output map too; in memory it is there once):

# %%
arguments = (params, jnp.int32(0), jnp.int32(0), state)
compiled = fixed.lower(*arguments, cfg=cfg).compile()
memory = compiled.memory_analysis()
print(f"arguments {memory.argument_size_in_bytes / 1e6:6.1f} MB, weights and cache")
print(f"results   {memory.output_size_in_bytes / 1e6:6.1f} MB")
print(f"in place  {memory.alias_size_in_bytes / 1e6:6.1f} MB of them: the cache is donated")
print(f"temporary {memory.temp_size_in_bytes / 1e6:6.1f} MB")
print(
    f"program   {len(compiled.as_text().splitlines())} lines: the {cfg.n_layer} layers are a loop"
)

# %% [markdown]
# `python -m minfer_jax.bench --compile` shows the same for every program of a model, and what
# tracing, lowering and compiling take of it.
#
# Next: [training](07_train_an_adapter.ipynb).
