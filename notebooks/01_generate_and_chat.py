# %% [markdown]
# # 1. Generate and chat
#
# A GGUF file is loaded, asked, and looked at while it answers. All lessons use SmolLM2-135M (98
# MB), which is fetched on first use.

# %%
import matplotlib.pyplot as plt
import numpy as np

import minfer_jax
from minfer_jax import Conversation
from minfer_jax.constraint import Constraint

model = minfer_jax.load("smollm2", n_ctx=2048)
print(model.cfg.n_layer, "layers of width", model.cfg.n_embd, "and", model.cfg.n_vocab, "tokens")

# %% [markdown]
# `stream` gives the answer piece by piece. What the run did is in `stats`; compiling is counted
# apart.

# %%
for piece in model.stream("Why is the sky blue?", max_tokens=60, temperature=0.0):
    print(piece, end="", flush=True)

stats = model.stats
print(
    f"\n\n{stats.n_prompt} tokens read, {stats.n_generated} written, ended by {stats.finish_reason}"
)
print(f"{stats.decode_rate:.0f} tokens a second, after {stats.compile_seconds:.1f} s of compiling")

# %% [markdown]
# ## What the model is really given
#
# A chat model continues a text with marks in it. The file holds a template that puts them there,
# and `encode_prompt` applies it. The marks are tokens of their own: nothing that a user types turns
# into one.

# %%
ids = model.encode_prompt("Why is the sky blue?")
print("|".join(model.tokenizer.decode([i], skip_special=False) for i in ids))

# %% [markdown]
# ## What it says
#
# The model's answer is not a word but a number for each token of the vocabulary: the logits. Their
# softmax is how likely each is to come next. The temperature divides the logits before that, so a
# low one sharpens and a high one flattens.

# %%
text = "The best thing about the weekend is the"
ids = model.tokenizer.encode(text)
logits = model.logits(ids)[-1]  # after the last token
best = np.argsort(logits)[::-1][:12]


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
for i, t in enumerate((0.5, 0.7, 1.0)):
    p = softmax(logits / t)[best]
    ax.bar(np.arange(12) + 0.27 * (i - 1), p, 0.27, label=f"temperature {t}: {p.sum():.0%} in all")
ax.set_xticks(range(12), [repr(model.tokenizer.decode([i])) for i in best], rotation=40, ha="right")
ax.set_ylabel("probability")
ax.set_title(f"{text} ...", fontsize=10)
ax.legend()
plt.show()

# %% [markdown]
# ## Seeds
#
# A draw depends on the logits, the seed and the number of the draw, and on nothing else. The same
# seed gives the same text.

# %%
options = {"max_tokens": 16, "temperature": 1.0, "template": False}
first = model.generate(text, seed=7, **options)
again = model.generate(text, seed=7, **options)
other = model.generate(text, seed=8, **options)
print(first == again, first == other)
print(repr(first), repr(other), sep="\n")

# %% [markdown]
# Several answers to one prompt are drawn side by side. The prompt is run once.

# %%
for answer in model.generate_many("Name a river.", n=4, max_tokens=24, temperature=0.9):
    print("-", answer.replace("\n", " "))

# %% [markdown]
# ## How sure it was
#
# Token by token, with the log-probability of what was drawn. Where a bar is long the model had
# other words in mind.

# %%
prompt = model.encode_prompt("Write one sentence about the sea.")
drawn = list(
    model.engine.generate_with_logprobs(
        prompt, 28, temperature=0.8, seed=3, stop_ids=model.tokenizer.eog_ids
    )
)
surprise = [-d.logprob / np.log(2) for d in drawn]

fig, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
ax.bar(range(len(drawn)), surprise)
ax.set_xticks(
    range(len(drawn)),
    [model.tokenizer.decode([d.token]).strip() for d in drawn],
    rotation=55,
    ha="right",
)
ax.set_ylabel("bits")
ax.set_title(f"Surprise of each token; {np.mean(surprise):.2f} bits on average", fontsize=10)
plt.show()

# %% [markdown]
# ## A conversation
#
# `Conversation` keeps what was said. A turn runs only the tokens that are new in it: keys and
# values of the others are still there.

# %%
chat = Conversation(model, system="Be brief.", temperature=0.0, max_tokens=40)
for words in ("What is the capital of France?", "And of Italy?", "Which of them is older?"):
    answer = "".join(chat.say(words))
    n = chat.model.stats
    print(f"> {words}\n{answer}\n  [{n.n_prompt} tokens, {n.n_reused} of them held already]\n")

# %% [markdown]
# ## An answer of a given form
#
# A constraint forbids, at each step, every token after which the text could not be completed any
# more. A regular expression, a JSON schema and a grammar are such constraints.

# %%
verdict = Constraint.from_regex("yes|no")
print(model.generate("Is fire cold?", constraint=verdict, temperature=0.0))

city = Constraint.from_json_schema(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
)
print(model.generate("Name a city and its country.", constraint=city, temperature=0.0))

# %% [markdown]
# A small model in a form is still a small model: the form is right whatever the content is.
#
# Next: [what is in the file](02_inside_a_gguf.ipynb).
