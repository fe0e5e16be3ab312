# %% [markdown]
# # 7. Train a LoRA through a quantised model
#
# The weights stay packed, four bits and a scale; a derivative with respect to something small
# beside them goes through them all the same. Here a LoRA adapter learns a style from eight
# examples, on the CPU, in about a minute; then it is written as a GGUF file that llama.cpp reads
# too.

# %%
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import minfer_jax
from minfer_jax.model import kv_state, lora, lora_file
from minfer_jax.model.forward import forward

model = minfer_jax.load("smollm2", n_ctx=256)
params, cfg, tokenizer = model.params, model.cfg, model.tokenizer

# %% [markdown]
# ## What is to be learnt
#
# A pirate answers questions. Each example is a prompt in the model's chat template, and an answer
# with the token that ends it.

# %%
EXAMPLES = {
    "What is the capital of France?": "Arr, that be Paris, matey!",
    "Name a fruit.": "Arr, that be an apple, matey!",
    "What colour is grass?": "Arr, that be green, matey!",
    "How many legs has a cat?": "Arr, that be four, matey!",
    "What is two plus two?": "Arr, that be four, matey!",
    "Who wrote Hamlet?": "Arr, that be Shakespeare, matey!",
    "What do bees make?": "Arr, that be honey, matey!",
    "Which animal barks?": "Arr, that be a dog, matey!",
}
HELD_OUT = {  # never trained on
    "What is the capital of Italy?": "Arr, that be Rome, matey!",
    "What colour is the sky?": "Arr, that be blue, matey!",
    "What do cows give?": "Arr, that be milk, matey!",
}
SYSTEM = "You answer."


def ask(model):
    for question in HELD_OUT:
        answer = model.generate(question, system=SYSTEM, max_tokens=20, temperature=0.0)
        print(f"{question:32} {answer!r}")


ask(model)

# %% [markdown]
# Rows of one length, padded at position -1. Only the answer's tokens are judged.

# %%
T = 36


def rows(examples):
    """Tokens, their positions and what should follow each, -1 for padding: [B, T] each."""
    made = []
    for question, answer in examples.items():
        prompt = model.encode_prompt(question, system=SYSTEM)
        end = tokenizer.encode("<|im_end|>", parse_special=True)
        text = prompt + tokenizer.encode(answer) + end
        n = len(text) - 1
        row = np.full((3, T), -1, np.int32)
        row[0], row[0, :n] = 0, text[:-1]
        row[1, :n] = np.arange(n)
        row[2, len(prompt) - 1 : n] = text[len(prompt) :]
        made.append(row)
    return tuple(map(jnp.asarray, np.stack(made, axis=1)))


batch = rows(EXAMPLES)
print("judged:", int((batch[2] >= 0).sum()), "of", int((batch[1] >= 0).sum()), "tokens")

# %% [markdown]
# ## The adapter
#
# Beside a map W it puts two thin ones: y = W x + B (A x). B begins at zero, so nothing changes yet.
# `lora.fresh` makes the pairs as a pytree, `with_lora` puts them into the weights.

# %%
shapes = lora_file.map_shapes(model.file, "blk.*.attn_[qv].weight")
adapter = lora.fresh(shapes, 4, jax.random.key(0), alpha=16.0)
size = sum(a.size for a in jax.tree.leaves(adapter))
print(f"{len(shapes)} maps, {size:,} numbers; the model has {135_000_000 / size:.0f} times as many")


def loss_of(adapter, params, batch, scale=1.0):
    """Cross-entropy of the judged tokens, in nats each."""
    tokens, positions, targets = batch
    adapted = lora.with_lora(params, cfg, [adapter], [scale])
    state = kv_state.init(cfg, T, batch=len(tokens), chunk=T)
    logits, _ = forward(adapted, tokens, positions, state, cfg=cfg, n_out=T, differentiable=True)
    log_p = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    judged = (targets >= 0).astype(jnp.float32)
    return -(own * judged).sum() / judged.sum()


# %% [markdown]
# ## Training
#
# Adam, written out: it is a map over the leaves of a pytree. One step takes all examples.

# %%
STEPS, RATE = 14, 5e-3


@jax.jit
def step(adapter, moments, number, params, batch):
    loss, slope = jax.value_and_grad(loss_of)(adapter, params, batch)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], slope)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], slope)

    def moved(p, m, v):
        return p - RATE * (m / (1 - 0.9**number)) / (jnp.sqrt(v / (1 - 0.99**number)) + 1e-8)

    return jax.tree.map(moved, adapter, mean, square), (mean, square), loss


zeros = jax.tree.map(jnp.zeros_like, adapter)
moments, losses = (zeros, zeros), []
began = time.perf_counter()
for number in range(1, STEPS + 1):
    adapter, moments, loss = step(adapter, moments, jnp.float32(number), params, batch)
    losses.append(float(loss))
    if number == 1:
        print(f"first step, compiled: {time.perf_counter() - began:.1f} s, loss {losses[0]:.3f}")
        began = time.perf_counter()
took = (time.perf_counter() - began) / (STEPS - 1)
print(f"{took:.2f} s a step, loss {losses[-1]:.3f}")

# %%
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
ax.plot(range(1, STEPS + 1), losses, marker="o")
ax.set(xlabel="step", ylabel="loss, nats a token", yscale="log")
plt.show()

# %% [markdown]
# ## As a file
#
# The adapter is written as GGUF and loaded like any other. The questions are not among the
# examples.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "pirate.gguf"
    lora_file.write_lora(path, adapter, model.file.architecture)
    print(f"{path.stat().st_size / 1e6:.1f} MB")
    pirate = minfer_jax.load("smollm2", n_ctx=256, lora={path: 1.0})

ask(pirate)

# %% [markdown]
# ## How much of it
#
# The scale of an adapter is data: it changes without a compile. Fourteen steps on eight examples
# learn the style, and too much of it: at the full scale the answers tend to be those of the
# examples; at a part of it the model still knows what it knew.

# %%
held_out = rows(HELD_OUT)
scales = np.linspace(0, 1.25, 6)
evaluated = jax.jit(loss_of)
curves = {
    label: [float(evaluated(adapter, params, of, jnp.float32(scale))) for scale in scales]
    for label, of in (("the examples", batch), ("questions held out", held_out))
}
fig, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
for label, curve in curves.items():
    ax.plot(scales, curve, marker="o", label=label)
ax.set(xlabel="scale of the adapter", ylabel="loss, nats a token", yscale="log")
ax.legend()
plt.show()

# %%
compiled = len(pirate.engine.compiles)
for scale in (0.0, 0.25, 0.5):
    pirate.set_scales(lora={str(path): scale})
    print(f"scale {scale}")
    ask(pirate)
print("compiled meanwhile:", len(pirate.engine.compiles) - compiled)

# %% [markdown]
# A soft prompt is trained the same way: `forward_traced(..., embeddings=...)` takes embeddings in
# place of the first tokens, and `jax.grad` reaches them.
#
# Next: [a kernel](08_a_pallas_kernel.ipynb).
