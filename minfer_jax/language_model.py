"""Text in, text out: an engine with its tokenizer."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from minfer_jax import compile_cache, memory, sources
from minfer_jax.context import CHUNK, MAX_TOKENS, N_CTX, EngineError
from minfer_jax.draft_model import USUAL, DraftModel, check_same_vocabulary
from minfer_jax.engine import Engine
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.prompt import Messages, encode_prompt
from minfer_jax.run_stats import RunStats
from minfer_jax.sampling import SamplingParams
from minfer_jax.speculation import Drafter
from minfer_jax.stop_strings import StopStrings
from minfer_jax.stream_decoder import StreamDecoder
from minfer_jax.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("minfer_jax")

_CHARACTER = 4  # tokens that one character takes at most, a byte each


class LanguageModel:
    """A loaded model.

    Attributes:
        engine: runs tokens.
        tokenizer: None where the file holds none that is known; then only the token-level calls
            work.
        file: the open GGUF file.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, file: GGUFFile) -> None:
        """See `load`."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.file = file

    @property
    def params(self) -> Params:
        """The weights."""
        return self.engine.params

    @property
    def cfg(self) -> ModelConfig:
        """The configuration."""
        return self.engine.cfg

    @property
    def stats(self) -> RunStats:
        """What the latest run did."""
        return self.engine.stats

    def generate_tokens(
        self, token_ids: Sequence[int], max_tokens: int = MAX_TOKENS, **options: float
    ) -> Iterator[int]:
        """See `Engine.generate_tokens`."""
        return self.engine.generate_tokens(token_ids, max_tokens, **options)  # pyright: ignore

    def continue_tokens(self, max_tokens: int = MAX_TOKENS) -> Iterator[int]:
        """See `Engine.continue_tokens`."""
        return self.engine.continue_tokens(max_tokens)

    def save_state(self, path: str | Path) -> None:
        """Write what the latest run left into a file, to be continued in this process or another.

        Args:
            path: where to; a file that is there is replaced.

        Raises:
            ValueError: nothing was run yet (EngineError), or the file cannot be written
                (StateError).
        """
        self.engine.save_state(path, self._digest)

    def load_state(self, path: str | Path) -> None:
        """Restore what `save_state` wrote; `continue_tokens` and `continue_stream` then go on.

        Raises:
            ValueError: the file is damaged, or of another model, cache type or precision
                (StateError); there is no memory for it (EngineError).
        """
        self.engine.load_state(path, self._digest)

    @functools.cached_property
    def _digest(self) -> str:
        """Of the model's file; it takes some time, so only where it is needed."""
        return self.file.sha256()

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
        """See `Engine.logits`."""
        return self.engine.logits(token_ids, chunk)

    def encode_prompt(
        self, prompt: str | Messages, *, system: str | None = None, template: bool | None = None
    ) -> list[int]:
        """The tokens of a prompt; see `prompt.encode_prompt`.

        Raises:
            ValueError: as there, and TokenizerError where the file has no tokenizer that is known.
        """
        tokenizer = self._known_tokenizer()
        return encode_prompt(self.file, tokenizer, prompt, system=system, template=template)

    def drafter(self, model: "LanguageModel", most: int = USUAL) -> DraftModel:
        """A smaller model as `draft` of `stream` and `generate`: it guesses, and this one checks.

        Args:
            model: the smaller one, which runs nothing else meanwhile.
            most: guesses that one call checks at most.

        Raises:
            ValueError: it is this model, its vocabulary is another, or most is out of range
                (EngineError); one of the two has no tokenizer (TokenizerError).
        """
        if model.engine is self.engine:
            raise EngineError("a model cannot draft for itself: load a smaller one beside it")
        vocabs = [m._known_tokenizer().vocab.tokens for m in (self, model)]
        check_same_vocabulary(*vocabs)
        return DraftModel(model.engine, most)

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        system: str | None = None,
        template: bool | None = None,
        context_shift: bool = False,
        n_keep: int = 0,
        draft_ngram: bool | int = False,
        draft: Drafter | None = None,
        **sampling: float,
    ) -> Iterator[str]:
        """The answer, piece by piece.

        Args:
            prompt: see `encode_prompt`, as `system` and `template`.
            max_tokens: how many tokens to draw at most.
            stop: strings that end the text; they are not part of it.
            system: a system message.
            template: whether to use the chat template.
            context_shift: go on when the context is full; see `Engine.generate_tokens`.
            n_keep: tokens of the prompt, after BOS where it has one, that no shift drops; all of it
                if negative.
            draft_ngram: see `Engine.generate_tokens`; the text is the same, and comes faster where
                it repeats itself or the prompt.
            draft: from `drafter`.
            **sampling: fields of SamplingParams, with its defaults.

        Yields:
            Pieces of text, whole characters each.

        Raises:
            ValueError: what the engine, the tokenizer, the template or SamplingParams refuse.
        """
        return self.stream_ids(
            self.encode_prompt(prompt, system=system, template=template),
            max_tokens=max_tokens,
            stop=stop,
            context_shift=context_shift,
            n_keep=n_keep,
            draft_ngram=draft_ngram,
            draft=draft,
            **sampling,
        )

    def stream_ids(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        context_shift: bool = False,
        n_keep: int = 0,
        draft_ngram: bool | int = False,
        draft: Drafter | None = None,
        **sampling: float,
    ) -> Iterator[str]:
        """As `stream`, for a prompt that is tokens already."""
        tokenizer = self._known_tokenizer()
        chosen = {"repeat_penalty": SamplingParams.repeat_penalty, **sampling}
        tokens = self.engine.generate_tokens(
            token_ids,
            max_tokens,
            stop_ids=tokenizer.eog_ids,
            context_shift=context_shift,
            n_keep=n_keep + tokenizer.add_bos if n_keep >= 0 else n_keep,  # as llama.cpp counts
            draft_ngram=draft_ngram,
            draft=draft,
            **chosen,  # pyright: ignore
        )
        return self._text(tokens, tokenizer.stream_decoder(continues=True), StopStrings(stop))

    def continue_stream(
        self, *, max_tokens: int = MAX_TOKENS, stop: Sequence[str] | str = ()
    ) -> Iterator[str]:
        """More of the answer that the latest run, or the one that was restored, has begun.

        Args:
            max_tokens: how many more tokens to draw at most.
            stop: strings that end the text, as far as they lie in this part of it.

        Raises:
            ValueError: as for `Engine.continue_tokens`, and TokenizerError without a tokenizer.
        """
        decoder = self._known_tokenizer().stream_decoder(continues=True)
        tokens = self.engine.continue_tokens(max_tokens)
        for token in self.engine.tokens[-_CHARACTER:]:
            decoder.push(token)  # a character that is begun is ended by what comes
        return self._text(tokens, decoder, StopStrings(stop))

    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(f"{self.file.path}: no tokenizer that is known; give token ids")
        return self.tokenizer

    def _text(
        self, tokens: Iterator[int], decoder: StreamDecoder, stops: StopStrings
    ) -> Iterator[str]:
        for token in tokens:
            if text := stops.push(decoder.push(token)):
                yield text
            if stops.stopped:
                self.engine.stats.finish_reason = "stop"
                return
        rest = stops.push(decoder.flush())
        if text := rest + stops.flush():
            yield text

    def generate(self, prompt: str | Messages, **options) -> str:
        """The whole answer as one string; arguments as for `stream`."""
        return "".join(self.stream(prompt, **options))


def load(
    model: str | Path = sources.DEFAULT_MODEL,
    *,
    n_ctx: int = N_CTX,
    precision: str = "default",
    cache_type: str | None = None,
    prefill_chunk: int = CHUNK,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> LanguageModel:
    """Load a model.

    Args:
        model: a reference that `sources.resolve` knows: a path, an alias such as "smollm2", a
            cached name.
        n_ctx: positions of context, bounded by what the model was made for.
        precision: "highest" is float32 throughout; "default" is what is fast here.
        cache_type: what keys and values are rounded to: f32, f16, bf16 or q8_0; None for f16, or
            f32 at the highest precision.
        prefill_chunk: prompt tokens that one call runs at most.
        on_bytes: called with the size of each weight that was read, for a progress bar.

    Raises:
        ValueError: one line: the reference leads nowhere (SourceError), the file is broken
            (GGUFError), or cannot be run (ModelError), or an argument is out of range.
    """
    file = open_gguf(sources.resolve(model))
    return from_file(
        file,
        n_ctx=n_ctx,
        precision=precision,
        cache_type=cache_type,
        prefill_chunk=prefill_chunk,
        on_bytes=on_bytes,
    )


def from_file(
    file: GGUFFile,
    *,
    n_ctx: int = N_CTX,
    precision: str = "default",
    cache_type: str | None = None,
    prefill_chunk: int = CHUNK,
    tokenizer: Tokenizer | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> LanguageModel:
    """As `load`, from an open file; a tokenizer that is already built is used as it is."""
    memory.share_arenas()
    compile_cache.enable()
    cfg, params = load_model(file, precision=precision, cache_type=cache_type, on_bytes=on_bytes)
    engine = Engine(params, cfg, n_ctx=n_ctx, prefill_chunk=prefill_chunk)
    if tokenizer is None:
        try:
            tokenizer = Tokenizer.from_gguf(file)
        except TokenizerError as e:
            log.info("%s", e)
    return LanguageModel(engine, tokenizer, file)
