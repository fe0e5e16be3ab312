# %% [markdown]
# # 7. Train a LoRA through a quantised model
#
# The weights stay packed, four bits and a scale; a derivative with respect to something small
# beside them goes through them all the same. Here a LoRA adapter learns a style from eight
# examples, on the CPU, in about a minute; then it is written as a GGUF file that llama.cpp reads
# too.

# %%
import dataclasses
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
QUESTIONS = ("What is the capital of Italy?", "What colour is the sky?", "What do cows give?")
SYSTEM = "You answer."

end = min(tokenizer.eog_ids)
END = [i for i in tokenizer.eog_ids if tokenizer.decode([i], skip_special=False) == "<|im_end|>"]
prompts = [model.encode_prompt(question, system=SYSTEM) for question in EXAMPLES]
answers = [[*tokenizer.encode(answer), *END] for answer in EXAMPLES.values()]
T = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True)) - 1
print(len(EXAMPLES), "examples,", T, "tokens at most")


def before_and_after(model):
    for question in QUESTIONS:
        answer = model.generate(question, system=SYSTEM, max_tokens=20, temperature=0.0)
        print(f"{question:32} {answer!r}")


before_and_after(model)

# %% [markdown]
# Rows of one length, padded at position -1. Only the answer's tokens are judged.

# %%
n = len(EXAMPLES)
tokens, targets = np.zeros((n, T), np.int32), np.full((n, T), -1, np.int32)
positions = np.full((n, T), -1, np.int32)
for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
    text = p + a
    tokens[row, : len(text) - 1] = text[:-1]
    positions[row, : len(text) - 1] = np.arange(len(text) - 1)
    targets[row, len(p) - 1 : len(text) - 1] = a
batch = jax.tree.map(jnp.asarray, (tokens, positions, targets))
print("judged:", int((targets >= 0).sum()), "of", int((positions >= 0).sum()), "tokens")

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


def loss_of(adapter, params, batch):
    """Cross-entropy of the judged tokens, in nats each."""
    tokens, positions, targets = batch
    adapted = lora.with_lora(params, cfg, [adapter])
    state = kv_state.init(cfg, T, batch=len(tokens), chunk=T)
    logits, _ = forward(adapted, tokens, positions, state, cfg=cfg, n_out=T, differentiable=True)
    log_p = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    judged = (targets >= 0).astype(jnp.float32)
    return -(own * judged).sum() / judged.sum()


# %% [markdown]
# ## Training
#
# Adam, written out: it is a map over the leaves of a pytree. One step reads all examples.

# %%
STEPS, RATE = 20, 5e-3


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
