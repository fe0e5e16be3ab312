"""From a user's words to the tokens of a prompt."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minfer_jax.chat_template import ChatTemplate
from minfer_jax.gguf import GGUFFile
from minfer_jax.stop_strings import overlap
from minfer_jax.tokenizer import Tokenizer

log = logging.getLogger("minfer_jax")

Messages = Sequence[Mapping[str, Any]]

# A private-use character on each side of a number: stands in a message for text that looks like a
# control token.
_OPEN, _CLOSE = "\U000f8000", "\U000f8001"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as a template wrote it.

    Attributes:
        text: all of it, control tokens by their names.
        literal: stretches of it, (start, stop), ascending, in which someone else than the template
            has spelled a control token, or begun to: there it is text.
    """

    text: str
    literal: tuple[tuple[int, int], ...]


def has_template(file: GGUFFile) -> bool:
    """Whether the file brings a chat template."""
    source = file.get("tokenizer.chat_template")
    return isinstance(source, str) and bool(source)


def template_of(file: GGUFFile, tokenizer: Tokenizer) -> ChatTemplate:
    """The file's chat template; the ChatML fallback (with its warning) where there is none.

    Raises:
        ChatTemplateError: the template is broken.
    """
    return ChatTemplate(
        file.get("tokenizer.chat_template") if has_template(file) else None,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def encode_prompt(
    file: GGUFFile,
    tokenizer: Tokenizer,
    prompt: str | Messages,
    *,
    system: str | None = None,
    template: bool | None = None,
) -> list[int]:
    """The tokens of a prompt.

    Args:
        file: where the chat template is.
        tokenizer: the file's tokenizer.
        prompt: a user's words, or messages with "role" and "content".
        system: a system message to put first.
        template: render messages through the chat template; None does so unless the prompt is plain
            words and the file has no template: then the words go to the model as they are, which is
            what a base model expects.

    Raises:
        ChatTemplateError: the template refuses the messages, or is broken.
        ValueError: messages or a system message were given, but no template is to be used.
    """
    plain = isinstance(prompt, str)
    if template is None:
        template = not plain or system is not None or has_template(file)
        if not template:
            log.warning("the file has no chat template: the prompt goes to the model as it is")
    if not template:
        if not plain or system is not None:
            raise ValueError("messages need a chat template; give a plain prompt without one")
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}] if plain else list(prompt)
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return encode_messages(template_of(file, tokenizer), tokenizer, messages)


def encode_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Messages, /, **options: Any
) -> list[int]:
    """Render messages and tokenize them: the template's control tokens count, a user's do not.

    Args:
        template: renders the messages.
        tokenizer: knows the control tokens.
        messages: "role" and "content" each; content is text, or a list of parts with "text".
        **options: passed on to `ChatTemplate.render`.

    Returns:
        Token ids, with BOS where the tokenizer adds it.
    """
    rendered = render_messages(template, tokenizer, messages, **options)
    return tokenizer.encode(rendered.text, parse_special=True, literal=rendered.literal)


def render_messages(
    template: ChatTemplate, tokenizer: Tokenizer, messages: Messages, /, **options: Any
) -> Rendered:
    """Render messages, and tell which of the control tokens in the text are not the template's.

    Text in a message that spells a control token is hidden from the template behind a stand-in, put
    back into the rendered text, and marked there as literal. So is the beginning of one at the end
    of a part, as templates write parts one after the other. Roles and types, which templates
    compare, pass as they are.

    Args:
        template: as for `encode_messages`, and all others too.
        tokenizer: knows the control tokens.
        messages: what to render.
        **options: passed on to `ChatTemplate.render`.

    Raises:
        ChatTemplateError: the template refuses the messages, or is broken.
    """
    hidden: list[str] = []
    controls = tokenizer.control_texts
    heads = {control[:4] for control in controls}  # few, where there are thousands of controls

    def stand_in(text: str) -> str:
        hidden.append(text)
        return f"{_OPEN}{len(hidden) - 1}{_CLOSE}"

    def has_head(text: str) -> bool:
        return any(head in text for head in heads)

    def hide(text: str, in_list: bool) -> str:
        for control in (_OPEN, *(controls if has_head(text) else ())):
            if control in text:
                text = text.replace(control, stand_in(control))
        end = text.rstrip()
        begun = max((overlap(end, c) for c in controls), default=0) if in_list else 0
        if begun:
            cut = len(end) - begun
            text = end[:cut] + stand_in(end[cut:]) + text[len(end) :]
        return text

    def plain(value: Any) -> bool:
        return not (
            isinstance(value, str) and has_head(value) and any(c in value for c in controls)
        )

    def guarded(value: Any, in_list: bool = False) -> Any:
        if isinstance(value, str):
            return hide(value, in_list)
        if isinstance(value, list | tuple):
            return [guarded(v, True) for v in value]
        if isinstance(value, Mapping):
            return {
                guarded(k): v if k in ("role", "type") and plain(v) else guarded(v, in_list)
                for k, v in value.items()
            }
        return value

    rendered = template.render([guarded(m) for m in messages], **options)
    text, literal = "", []
    for i, piece in enumerate(rendered.split(_OPEN)):
        number, closed, rest = piece.partition(_CLOSE)
        if i and closed and number.isdecimal() and int(number) < len(hidden):
            start = len(text)
            text += hidden[int(number)]
            literal.append((start, len(text)))
            text += rest
        else:
            text += (_OPEN if i else "") + piece
    return Rendered(text=text, literal=tuple(literal))
