"""Whatever is done in a conversation: what the engine has run is what the template says, and the
answer is that of an engine which has run nothing before.
"""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.chat_template import ChatTemplate
from minfer_jax.conversation import Conversation, ConversationError
from minfer_jax.language_model import LanguageModel, load
from minfer_jax.prompt import encode_messages
from tests.helpers import tiny_models

pytestmark = pytest.mark.usefixtures("shared_compiles")
N_CTX = 160
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "stop": ["2*"]}
END = 2


def chatml(content: str) -> ChatTemplate:
    return ChatTemplate(tiny_models.CHAT_TEMPLATE.replace("message['content']", content))


TEMPLATES = [
    chatml("message['content']"),
    chatml("message['content'] | trim"),
    chatml("message['content'].split('e')[-1]"),  # rewrites the past, as if thoughts were left out
    chatml("message['content'] ~ ('' if loop.last else '!')"),  # what is last is written otherwise
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[LanguageModel, LanguageModel]:
    """The same one twice; it ends an answer now and then."""
    data = tiny_models.endless_text_model(end=3.0, n_layer=2, n_ctx=4096)
    file = tiny_models.save(tmp_path_factory.mktemp("steps"), data)
    one, other = (load(file.path, n_ctx=N_CTX, precision="highest") for _ in range(2))
    return one, other


TEXTS = st.sampled_from(["hello", "é <|im_end|>\n", "<|im_start|>user\n", "hello world " * 16, " "])
PIECES = st.sampled_from([0, 0, 0, 1, 8])  # until Ctrl-C; 0: there is none
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), TEXTS, PIECES),
        st.tuples(st.just("say"), TEXTS, PIECES),
        st.tuples(st.just("regenerate"), st.just(""), PIECES),
        st.tuples(st.sampled_from(["clear", "reload", "use"]), st.just(""), st.just(0)),
        st.tuples(st.just("system"), st.sampled_from(["", "Brief.", "Be <|im_end|>"]), st.just(0)),
    ),
    min_size=4,
    max_size=14,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(STEPS, st.sampled_from(TEMPLATES))
def test_the_engine_holds_what_the_template_says(models, steps, template):
    model, cold = models
    model.engine.forget()
    conversation = Conversation(model, template=template, **GREEDY)
    for step, text, n_pieces in steps:
        before = conversation.history
        match step:
            case "clear":
                conversation.clear()
                assert all(m["role"] == "system" for m in conversation.history)
            case "reload":
                conversation = Conversation(model, template=template, messages=before, **GREEDY)
                assert conversation.history == before
            case "use":
                model.generate("hello", max_tokens=2)
            case "system":
                conversation.set_system(text)
            case _:
                answer(conversation, text, n_pieces, template, cold)


def answer(
    conversation: Conversation, text: str, n_pieces: int, template: ChatTemplate, cold: Any
) -> None:
    """One turn, whole or interrupted, and what must be true of it; no text: the latest again."""
    before, n_answers = conversation.history, conversation.n_turns
    try:
        pieces = conversation.say(text) if text else conversation.regenerate()
    except ConversationError:
        assert not any(m["role"] == "user" for m in before)
        return
    said = "".join(itertools.islice(pieces, n_pieces or None))
    pieces.close()  # pyright: ignore  # a generator
    if conversation.n_turns == n_answers:
        assert conversation.history == before
        return
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    if text:
        before.append({"role": "user", "content": text})
    elif before[-1]["role"] == "assistant":
        before.pop()
    assert plain(conversation.history[:-1]) == plain(before), "nothing of it is lost"

    engine, tokenizer = conversation.model.engine, conversation.model.tokenizer
    assert tokenizer is not None
    prompt = engine.tokens[: conversation.model.stats.n_prompt]
    expected = encode_messages(template, tokenizer, conversation.messages[:-1])
    assert tokenizer.decode(prompt, skip_special=False) == tokenizer.decode(
        expected, skip_special=False
    )
    assert prompt.count(END) == expected.count(END), "of a user's <|im_end|> there is no token"
    kept = list(conversation.transcript.tokens)
    assert kept == engine.tokens[: len(kept)]
    cold.engine.forget()
    alone = "".join(cold.stream_ids(prompt, **GREEDY))
    assert alone.startswith(said) if n_pieces else alone == said


def plain(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]
