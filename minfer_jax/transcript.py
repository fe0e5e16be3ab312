"""A conversation's text, and the tokens that it was run as.

A model may write an answer in other tokens than its text would become. So the next prompt is not
the tokens of the next rendering, but those that were run, as far as the rendering still says what
they say, and the tokens of the text after that.

    text      <|im_start|>user↵hi<|im_end|>↵<|im_start|>assistant↵Hel lo there↵
    marks                                                         ^           ^
    the next  <|im_start|>user↵hi<|im_end|>↵<|im_start|>assistant↵Hel lo there↵<|im_end|>↵...

A template may write the past otherwise than it was run: without its thoughts, or trimmed. Then the
tokens are kept up to the last mark before the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minfer_jax.prompt import Rendered
from minfer_jax.tokenizer import Tokenizer

_NOTHING = Rendered(text="", literal=())


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """What was run of a conversation.

    Attributes:
        prompt: the latest rendering that was run.
        answer: what the model wrote after it, as far as it is kept.
        tokens: of both.
        marks: (characters of the text, tokens), ascending: where a prompt or an answer ends, and
            where an answer ends without the white space at its end. A token ends at each of them.
    """

    prompt: Rendered = _NOTHING
    answer: str = ""
    tokens: tuple[int, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()

    def extended(self, prompt: Rendered, tokenizer: Tokenizer) -> "Transcript":
        """The transcript of the next prompt.

        Args:
            prompt: the whole conversation, up to where the model is to write.
            tokenizer: for what was not run yet.
        """
        marks = self.marks
        while marks and not self._agrees(prompt, marks[-1][0]):
            marks = marks[:-1]
        n, n_tokens = marks[-1] if marks else (0, 0)
        known = self.tokens[:n_tokens]
        rest = tokenizer.encode(
            prompt.text[n:],
            parse_special=True,
            literal=[(max(start - n, 0), stop - n) for start, stop in prompt.literal if stop > n],
            after=known[-1] if known else None,
        )
        tokens = (*known, *rest)
        marks = sorted({*marks, (len(prompt.text), len(tokens))})
        return Transcript(prompt=prompt, tokens=tokens, marks=tuple(marks))

    def answered(self, tokens: Sequence[int], answer: str, tokenizer: Tokenizer) -> "Transcript":
        """The transcript with an answer to its prompt.

        Args:
            tokens: those of this transcript, and what the model has drawn.
            answer: the text of what was drawn, or the beginning of it where that was cut: at a stop
                string, or by an interruption. Tokens that say more than it are left out.
            tokenizer: for the text of tokens.
        """
        n_prompt, shown = len(self.prompt.text), len(answer.rstrip())
        decoder, n = tokenizer.stream_decoder(continues=True), 0
        ends, bare = (n_prompt, len(self.tokens)), (n_prompt, len(self.tokens))
        for i, token in enumerate(tokens[len(self.tokens) :], len(self.tokens) + 1):
            n += len(decoder.push(token))
            if n > len(answer):
                break
            if n and decoder.is_whole:
                ends = n_prompt + n, i
                bare = ends if n <= shown else bare
        marks = sorted({*self.marks, bare, ends})
        return Transcript(
            prompt=self.prompt,
            answer=answer[: ends[0] - n_prompt],
            tokens=tuple(tokens[: ends[1]]),
            marks=tuple(marks),
        )

    def _agrees(self, prompt: Rendered, n: int) -> bool:
        """Whether the first n characters of a rendering are what was run."""
        if (self.prompt.text + self.answer)[:n] != prompt.text[:n]:
            return False
        # An answer is made of no control tokens, whatever it spells.
        until = min(n, len(self.prompt.text))
        one, other = (
            [stretch for stretch in literal if stretch[0] < until]
            for literal in (self.prompt.literal, prompt.literal)
        )
        return one == other
