"""A conversation with a model: turn after turn, each of which runs only what is new in it.

    conversation = Conversation(model, system="Be brief.", temperature=0.0)
    for piece in conversation.say("Why is the sky blue?"):
        print(piece, end="", flush=True)

The engine keeps the keys and values of what it has run; `Transcript` sees to it that the next
prompt begins with the same tokens.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from minfer_jax.chat_template import ChatTemplate
from minfer_jax.context import MAX_TOKENS, common_prefix
from minfer_jax.language_model import LanguageModel
from minfer_jax.prompt import Rendered, render_messages, template_of
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.seed import following
from minfer_jax.thinking import opens_thinking
from minfer_jax.tokenizer import TokenizerError
from minfer_jax.transcript import Transcript

Message = dict[str, Any]

# Turns are dropped when less than an eighth of the context is left for an answer (or less than the
# longest answer), and until a quarter is: as all that stays is run anew then, it must not be soon.
_LEAST, _ENOUGH = 8, 4
_DROPPED = "dropped"  # key of a message in `history`


class ConversationError(ValueError):
    """A turn that cannot be; the conversation is as it was before. One line."""


class Conversation:
    """Messages, and how they are continued.

    Attributes:
        model: what answers. It may be used for other things between turns.
        messages: what the model is told: "role" and "content" each.
        dropped: what was said before that, and is not told any more, as the context was full.
        max_tokens: tokens of an answer at most.
        n_turns: answers so far, those to `regenerate` too.
        n_dropped: turns that were dropped before the latest answer, as the context was full.
        thinks: whether the template has begun the latest answer with a block of thoughts.
        transcript: the messages as they were run.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        template: ChatTemplate | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        **sampling: Any,
    ) -> None:
        """Runs nothing yet.

        Args:
            model: what answers.
            system: a system message; it takes the place of one in `messages`.
            messages: what was said before, as `history` has it.
            template: renders the messages; None for that of the model's file.
            template_kwargs: further variables for the template, such as `enable_thinking`.
            max_tokens: tokens of an answer at most.
            stop: strings that end an answer; they are not part of it.
            **sampling: as for `LanguageModel.stream`. The seed is that of the first answer; every
                further one has the next.

        Raises:
            ChatTemplateError: the template is broken, or refuses a system message.
            TokenizerError: the model's tokenizer is of no kind that is known.
        """
        if model.tokenizer is None:
            raise TokenizerError(f"{model.file.path}: no tokenizer that is known")
        self.model = model
        self.messages: list[Message] = [dict(m) for m in messages if not m.get(_DROPPED)]
        self.dropped: list[Message] = [dict(m) for m in messages if m.get(_DROPPED)]
        self.max_tokens = max_tokens
        self.n_turns = 0
        self.n_dropped = 0
        self.thinks = False
        self.transcript = Transcript()
        self._tokenizer = model.tokenizer
        self._template = template or template_of(model.file, model.tokenizer)
        self._variables = dict(template_kwargs or {})
        stops = [stop] if isinstance(stop, str) else [*stop]
        if not self._template.source:  # ChatML, which may have no tokens here, so it ends in text
            stops.append("<|im_end|>")
        self._options = {"stop": stops, **sampling}
        if system is not None:
            self.set_system(system)

    def say(self, text: str) -> Iterator[str]:
        """The answer to a user's words, piece by piece.

        The turn becomes part of the conversation when the iterator ends or is closed, with what was
        answered until then; where nothing was, an interrupted turn leaves no trace.

        Args:
            text: what the user says. No control token in it is one.

        Raises:
            ConversationError: it does not fit into the context.
            ChatTemplateError: the template refuses the conversation, in its own words.
        """
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Iterator[str]:
        """Another answer in place of the latest; as `say`. The old one stays if this one fails.

        Raises:
            ConversationError: nothing was said yet.
        """
        n = len(self.messages)
        while n and self.messages[n - 1]["role"] == "assistant":
            n -= 1
        if not n or self.messages[n - 1]["role"] != "user":
            raise ConversationError("there is no answer yet that could be regenerated")
        return self._answer(self.messages[:n])

    def clear(self) -> None:
        """Forget all that was said, but not the system message."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self.dropped = []
        self.transcript = Transcript()

    def set_system(self, text: str | None) -> None:
        """Change the system message, for all answers from here on.

        Args:
            text: the new one; None or "" for none.

        Raises:
            ChatTemplateError: the template refuses it; the old one stays.
        """
        system = [{"role": "system", "content": text}] if text else []
        if system:
            self._rendered([*system, {"role": "user", "content": "."}])
        self.messages = system + [m for m in self.messages if m["role"] != "system"]

    @property
    def history(self) -> list[Message]:
        """All that was said, in order; what was dropped from the context is marked so."""
        begin = [*itertools.takewhile(lambda m: m["role"] == "system", self.messages)]
        dropped = [{**message, _DROPPED: True} for message in self.dropped]
        return [*begin, *dropped, *self.messages[len(begin) :]]

    @property
    def stopped_by(self) -> str | None:
        """What cut the latest answer: "n_predict", "context limit", "Ctrl-C"; None if nothing."""
        stats = self.model.stats
        if stats.finish_reason == "interrupted":
            return "Ctrl-C"
        if stats.finish_reason != "length":
            return None
        return "n_predict" if stats.n_generated >= self.max_tokens else "context limit"

    def n_held(self) -> tuple[int, int]:
        """How many tokens of the messages the engine need not run again, and how many there are.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        tokens = self._extended(self.messages, add_generation_prompt=False).tokens
        return common_prefix(self.model.engine.tokens, tokens), len(tokens)

    def _answer(self, messages: list[Message]) -> Iterator[str]:
        n, prompt = self._fitted(messages)
        dropped, kept = _without_oldest(messages, n)
        self.n_dropped = n
        self.thinks = opens_thinking(prompt.prompt.text)
        seed = following(self._options.get("seed", SamplingParams.seed), self.n_turns)
        # Many short turns follow: what their bucket costs to compile comes back.
        options = {**self._options, "seed": seed, "smallest_bucket": True}
        pieces = self.model.stream_ids(prompt.tokens, max_tokens=self.max_tokens, **options)

        def record(answer: str) -> None:
            self.n_turns += 1
            self.messages = [*kept, {"role": "assistant", "content": answer}]
            self.dropped += dropped
            tokens = tuple(self.model.engine.tokens)
            if tokens[: len(prompt.tokens)] != prompt.tokens:  # it has drawn none
                tokens = prompt.tokens
            self.transcript = prompt.answered(tokens, answer, self._tokenizer)

        return self._streamed(pieces, record)

    def _streamed(self, pieces: Iterator[str], record: Callable[[str], None]) -> Iterator[str]:
        said: list[str] = []
        try:
            for piece in pieces:
                said.append(piece)
                yield piece
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            if said:
                self.model.stats.finish_reason = "interrupted"
                record("".join(said))
            raise
        record("".join(said))

    def _fitted(self, messages: list[Message]) -> tuple[int, Transcript]:
        """How many of the oldest turns must go, for an answer to fit, and what is to be run."""
        n_ctx = self.model.engine.n_ctx
        n, prompt = 0, self._extended(messages)
        if len(prompt.tokens) + min(self.max_tokens, n_ctx // _LEAST) > n_ctx:
            most = n_ctx - n_ctx // _ENOUGH
            n_turns = sum(message["role"] == "user" for message in messages)

            def prompt_without(n: int) -> Transcript:
                return self._extended(_without_oldest(messages, n)[1])

            def fits(n: int) -> bool:
                return len(prompt_without(n).tokens) <= most

            # Halving, as there may be thousands, and each try renders what is left.
            n = bisect.bisect_left(range(n_turns - 1), True, key=fits)
            prompt = prompt_without(n)
        if len(prompt.tokens) > n_ctx:
            raise ConversationError(
                f"context full: {len(prompt.tokens)} tokens are needed and {n_ctx} available, "
                "with no turn left to drop: say less, or raise n_ctx"
            )
        return n, prompt

    def _extended(self, messages: list[Message], **options: bool) -> Transcript:
        return self.transcript.extended(self._rendered(messages, **options), self._tokenizer)

    def _rendered(self, messages: list[Message], **options: bool) -> Rendered:
        return render_messages(
            self._template, self._tokenizer, messages, **self._variables, **options
        )


def _without_oldest(messages: list[Message], n: int) -> tuple[list[Message], list[Message]]:
    """(the oldest n turns, all else); system messages are part of no turn."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    old, rest = messages[: users[n] if n else 0], messages[users[n] if n else 0 :]
    dropped = [message for message in old if message["role"] != "system"]
    return dropped, [*(message for message in old if message["role"] == "system"), *rest]
