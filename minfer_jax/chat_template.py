"""Chat templates: from a list of messages to the text that the model was trained on.

A model file carries its template as jinja2 source. It is run with what transformers offers there,
so that a template written for it gives the same text; `template_sandbox.py` limits what it may do.
"""

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from minfer_jax.template_sandbox import compile_template, run_template

_LOG = logging.getLogger("minfer_jax")

# For a file without a template. Each message: <|im_start|>ROLE\nCONTENT<|im_end|>\n
_CHATML = """\
{%- for message in messages -%}
    {%- set content = message.content -%}
    {%- if content and content is not string -%}
        {%- set texts = content | selectattr("type", "equalto", "text") -%}
        {%- set content = texts | map(attribute="text") | join -%}
    {%- endif -%}
    {{- "<|im_start|>" ~ message.role ~ "\\n" ~ (content or "") ~ "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}
"""

_MAX_MESSAGE = 500  # characters of an error that quotes a template's own words
_MAX_QUOTE = 80  # characters of a template's line in an error


class ChatTemplateError(ValueError):
    """A template that does not compile, or a conversation that it refuses; one line."""


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: The jinja2 text. None or empty: ChatML, without tools, and a warning.
        bos_token: What the template names `bos_token`. A template may or may not write it.
        eos_token: What the template names `eos_token`.
    """

    source: str | None
    bos_token: str = ""
    eos_token: str = ""
    _text: str = field(init=False, repr=False, compare=False)  # what is run: the source or _CHATML
    _template: Template = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        text = self.source if self.source and not self.source.isspace() else _CHATML
        if text is _CHATML:
            _LOG.warning(
                "the file has no chat template: messages are written as ChatML,"
                " which the model may not know"
            )
        try:
            template = compile_template(text)
        except TemplateError as error:
            raise ChatTemplateError(_compile_message(text, error)) from error
        object.__setattr__(self, "_text", text)
        object.__setattr__(self, "_template", template)

    def render(
        self,
        /,  # a template may have a variable of this name
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Writes a conversation as the model's text.

        Args:
            messages: Dicts with `role`, `content` (text, or a list of parts), and whatever else the
                template reads.
            tools: JSON schemas of functions that the model may call. An empty list stays one.
            add_generation_prompt: Whether the text ends where the assistant's next message begins.
            **kwargs: Further variables for the template, such as `enable_thinking` or `documents`.

        Returns:
            The text, control tokens included: encode it with `parse_special=True`.

        Raises:
            ChatTemplateError: With the template's own words where it refuses the conversation; else
                with the line of the template and what went wrong there.
        """
        _check_dicts("messages", messages)
        if tools is not None:
            _check_dicts("tools", tools)
        if tools and self._text is _CHATML:
            raise ChatTemplateError(
                "the file has no chat template, so the model cannot be told of tools"
            )
        variables = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "documents": None,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return run_template(self._template, _plain(variables))
        except Exception as error:
            raise ChatTemplateError(_render_message(self._text, error)) from error


def _check_dicts(name: str, values: Any) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ChatTemplateError(f"{name} is a {type(values).__name__}; a list of dicts is expected")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ChatTemplateError(
                f"{name}[{index}] is a {type(value).__name__}; a dict is expected"
            )


def _plain(value: Any) -> Any:
    """Rebuilds data from plain types, as transformers does: rich objects have unsafe methods.

    What is none of JSON's types becomes "<TYPE>": enough for a template that asks for an image.
    """
    match value:
        case None | bool() | FunctionType() | BuiltinFunctionType():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {_plain(key): _plain(element) for key, element in value.items()}
        case tuple():
            return tuple(_plain(element) for element in value)
        case list():
            return [_plain(element) for element in value]
        case _:
            return f"<{type(value).__name__}>"


def _one_line(text: str) -> str:
    line = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."


def _place(source: str, lineno: int) -> str:
    """Where in the template: `line 3, in "{% foo %}"`."""
    lines = source.splitlines()
    line = lines[lineno - 1].strip() if 0 < lineno <= len(lines) else ""
    quote = line if len(line) <= _MAX_QUOTE else line[: _MAX_QUOTE - 3] + "..."
    return f'line {lineno}, in "{quote}"'


def _compile_message(source: str, error: TemplateError) -> str:
    if isinstance(error, TemplateSyntaxError):
        return _one_line(f"chat template, {_place(source, error.lineno)}: {error.message}")
    return _one_line(f"chat template: {error}")


def _render_message(source: str, error: Exception) -> str:
    if type(error) is TemplateError:  # raise_exception; jinja2 itself raises subclasses only
        return (
            _one_line(str(error))
            or "the chat template refuses this conversation without saying why"
        )
    # jinja2 rewrites tracebacks, so that a template's frame has the line in the template
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    where = f", {_place(source, frames[-1].lineno or 0)}" if frames else ""
    what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return _one_line(f"chat template{where}: {what}")
