"""Text in, text out: an engine with its tokenizer."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_jax import adapters, compile_cache, memory, sources
from minfer_jax.adapters import Adapters, Scales
from minfer_jax.context import CHUNK, MAX_TOKENS, N_CTX, EngineError
from minfer_jax.draft_model import USUAL, DraftModel, check_same_vocabulary
from minfer_jax.engine import Engine
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.model.patches import Patch
from minfer_jax.prompt import Messages, encode_prompt
from minfer_jax.run_stats import RunStats
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.seed import settled
from minfer_jax.stop_strings import StopStrings
from minfer_jax.stream_decoder import StreamDecoder
from minfer_jax.text_options import breaking_tokens, token_options
from minfer_jax.tokenizer import Tokenizer, TokenizerError
from minfer_jax.tracing import Patched, Trace

if TYPE_CHECKING:
    from minfer_jax.constraint import Vocabulary

log = logging.getLogger("minfer_jax")

_CHARACTER = 4  # tokens that one character takes at most, a byte each


class LanguageModel:
    """A loaded model.

    Attributes:
        engine: runs tokens.
        tokenizer: None where the file holds none that is known; then only the token-level calls
            work.
        file: the open GGUF file.
        adapters: what was added to its weights, and the scales.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        file: GGUFFile,
        added: Adapters = adapters.NONE,
    ) -> None:
        """See `load`."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.file = file
        self.adapters = added

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

    def set_scales(self, lora: Scales | None = None, control_vectors: Scales | None = None) -> None:
        """Change how much adapters count, from the next run on. Nothing is compiled for it.

        What is held of the latest text is run anew, as other weights give other keys and values.

        Args:
            lora, control_vectors: scales by the names that `load` was given; others stay.

        Raises:
            ValueError: there is no such adapter, or a scale is no finite number.
        """
        self.adapters = adapters.rescaled(self.adapters, lora or {}, control_vectors or {})
        self.engine.params = adapters.with_own_scales(self.adapters, self.engine.params)

    def generate_tokens(
        self, token_ids: Sequence[int], max_tokens: int = MAX_TOKENS, **options: Any
    ) -> Iterator[int]:
        """See `Engine.generate_tokens`; `seed` may be None, as for `stream`."""
        return self.engine.generate_tokens(token_ids, max_tokens, **_with_seed(options))

    def continue_tokens(self, max_tokens: int = MAX_TOKENS, **drafts: Any) -> Iterator[int]:
        """See `Engine.continue_tokens`."""
        return self.engine.continue_tokens(max_tokens, **drafts)

    def save_state(self, path: str | Path) -> None:
        """Write what the latest run left into a file, to be continued in this process or another.

        Args:
            path: where to; a file that is there is replaced.

        Raises:
            ValueError: nothing was run yet (EngineError), or the file cannot be written
                (StateError).
        """
        self.engine.save_state(path, self._identity)

    def load_state(self, path: str | Path) -> None:
        """Restore what `save_state` wrote; `continue_tokens` and `continue_stream` then go on.

        Raises:
            ValueError: the file is damaged, or of another model, cache type, precision or other
                adapters or scales (StateError); there is no memory for it (EngineError).
        """
        self.engine.load_state(path, self._identity)

    @functools.cached_property
    def _digest(self) -> str:
        """Of the model's file; it takes some time, so only where it is needed."""
        return self.file.sha256()

    @property
    def _identity(self) -> str:
        """What a saved state is bound to: it has the keys and values of these weights."""
        return self._digest + adapters.identity(self.adapters)

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
        """See `Engine.logits`."""
        return self.engine.logits(token_ids, chunk)

    def trace(self, text: str | Sequence[int], names: str | Iterable[str]) -> Trace:
        """See `Engine.trace`; a text goes to the model as it is, without a chat template."""
        return self.patch({}).trace(text, names)

    def patch(self, patches: Mapping[str, Patch]) -> Patched:
        """See `Engine.patch`; what it gives takes texts as `trace` does."""
        encode = functools.partial(self.encode_prompt, template=False)
        return replace(self.engine.patch(patches), encode=encode)

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
        tokens, drafts = (m._known_tokenizer().vocab.tokens for m in (self, model))
        check_same_vocabulary(tokens, drafts)
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
        **options: Any,
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
            **options: fields of SamplingParams, with its defaults (a `seed` of None, or -1, is
                drawn: `stats.seed` says which it was); and

                logit_bias: dict of token ids, or texts of single tokens, to what is added to their
                    logits; -inf forbids one.
                ignore_eos: whether to forbid the tokens that end an answer.
                constraint: a `constraint.Constraint` that the answer must meet.
                dry_breakers: texts that break a sequence of DRY.
                draft_ngram, draft: guesses, from the text itself or from a `drafter`; the answer is
                    the same, and comes faster where they are right: see `Engine.generate_tokens`.
                n_logprobs, on_drawn: to be told how likely each token was, see
                    `Engine.generate_tokens`.

        Yields:
            Pieces of text, whole characters each.

        Raises:
            ValueError: what the engine, the tokenizer, the template or SamplingParams refuse; no
                token meets the constraint.
        """
        return self.stream_ids(
            self.encode_prompt(prompt, system=system, template=template),
            max_tokens=max_tokens,
            stop=stop,
            context_shift=context_shift,
            n_keep=n_keep,
            **options,
        )

    def stream_ids(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        context_shift: bool = False,
        n_keep: int = 0,
        **options: Any,
    ) -> Iterator[str]:
        """As `stream`, for a prompt that is tokens already."""
        tokenizer = self._known_tokenizer()
        tokens = self.engine.generate_tokens(
            token_ids,
            max_tokens,
            context_shift=context_shift,
            n_keep=n_keep + tokenizer.add_bos if n_keep >= 0 else n_keep,  # as llama.cpp counts
            **self._token_options(options),
        )
        return self._text(tokens, tokenizer.stream_decoder(continues=True), StopStrings(stop))

    def _token_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of an answer as those of its tokens."""
        tokenizer = self._known_tokenizer()
        options = {"repeat_penalty": SamplingParams.repeat_penalty, **_with_seed(options)}
        return token_options(
            tokenizer,
            self.cfg.n_vocab,
            lambda constraint: self._vocabulary.matcher(constraint),
            self._breaking,
            stop_ids=tokenizer.eog_ids,
            **options,
        )

    @functools.cached_property
    def _vocabulary(self) -> "Vocabulary":
        """For constraints."""
        from minfer_jax.constraint import Vocabulary  # llguidance takes time to load

        return Vocabulary(self._known_tokenizer(), self.cfg.n_vocab)

    @functools.cached_property
    def _breaking(self) -> Callable[[tuple[str, ...]], np.ndarray]:
        """For DRY: the latest few answers are kept, as every turn of a conversation asks again."""
        tell = functools.partial(breaking_tokens, self._known_tokenizer(), self.cfg.n_vocab)
        return functools.lru_cache(maxsize=4)(tell)

    def continue_stream(
        self, *, max_tokens: int = MAX_TOKENS, stop: Sequence[str] | str = (), **drafts: Any
    ) -> Iterator[str]:
        """More of the answer that the latest run, or the one that was restored, has begun.

        Args:
            max_tokens: how many more tokens to draw at most.
            stop: strings that end the text, as far as they lie in this part of it.
            **drafts: draft_ngram or draft, as for `stream`.

        Raises:
            ValueError: as for `Engine.continue_tokens`, and TokenizerError without a tokenizer.
        """
        decoder = self._known_tokenizer().stream_decoder(continues=True)
        tokens = self.engine.continue_tokens(max_tokens, **drafts)
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

    def generate_many(
        self,
        prompt: str | Messages,
        n: int = 4,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        system: str | None = None,
        template: bool | None = None,
        **options: Any,
    ) -> list[str]:
        """Several answers to one prompt, drawn side by side: see `Engine.generate_batch`.

        Args:
            prompt, stop, system, template, **options: as for `stream`, but for shifts, guesses and
                log-probabilities, which rows do not have.
            n: answers, up to 16. The first is that of the same seed alone, but for rounding.
            max_tokens: how many tokens to draw at most, of each.

        Returns:
            The answers. `stats.finish_reasons` says how each ended.
        """
        tokenizer, ended = self._known_tokenizer(), set()
        ids = self.encode_prompt(prompt, system=system, template=template)
        options = self._token_options(options)
        tokens = self.engine.generate_batch(ids, n, max_tokens, ended=ended, **options)
        decoders = [tokenizer.stream_decoder(continues=True) for _ in range(n)]
        stops = [StopStrings(stop) for _ in range(n)]
        texts = [""] * n
        for row, token in tokens:
            if not stops[row].stopped:
                texts[row] += stops[row].push(decoders[row].push(token))
            if stops[row].stopped:
                ended.add(row)
        for row in set(range(n)) - ended:
            texts[row] += stops[row].push(decoders[row].flush()) + stops[row].flush()
        return texts


def _with_seed(options: dict[str, Any]) -> dict[str, Any]:
    """The same with a seed, where one is to be drawn."""
    return {**options, "seed": settled(options["seed"])} if "seed" in options else options


def load(
    model: str | Path = sources.DEFAULT_MODEL,
    *,
    n_ctx: int = N_CTX,
    precision: str = "default",
    cache_type: str | None = None,
    prefill_chunk: int = CHUNK,
    kernels: str = "auto",
    steps_per_dispatch: int | None = None,
    lora: Scales | None = None,
    control_vectors: Scales | None = None,
    control_layers: tuple[int, int] | None = None,
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
        kernels: "auto" for the device's own where they pay, "xla" for none; "pallas" for those of
            a CUDA device, to lower its programs elsewhere.
        steps_per_dispatch: tokens that one call draws, 1 to 16; None for as many as take some
            40 ms. The tokens are the same.
        lora: LoRA adapters: GGUF files, or references to such, to the scale of each.
        control_vectors: control vectors likewise.
        control_layers: the first and the last layer, counted from 0, that they count in; None for
            all that they have.
        on_bytes: called with the size of each weight that was read, for a progress bar.

    Raises:
        ValueError: one line: the reference leads nowhere (SourceError), the file is broken
            (GGUFError), or cannot be run (ModelError), or an argument is out of range; an adapter
            is none, or does not fit (ModelError).
    """
    file = open_gguf(sources.resolve(model))
    return from_file(
        file,
        n_ctx=n_ctx,
        precision=precision,
        cache_type=cache_type,
        prefill_chunk=prefill_chunk,
        kernels=kernels,
        steps_per_dispatch=steps_per_dispatch,
        lora=lora,
        control_vectors=control_vectors,
        control_layers=control_layers,
        on_bytes=on_bytes,
    )


def from_file(
    file: GGUFFile,
    *,
    n_ctx: int = N_CTX,
    precision: str = "default",
    cache_type: str | None = None,
    prefill_chunk: int = CHUNK,
    kernels: str = "auto",
    steps_per_dispatch: int | None = None,
    lora: Scales | None = None,
    control_vectors: Scales | None = None,
    control_layers: tuple[int, int] | None = None,
    tokenizer: Tokenizer | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> LanguageModel:
    """As `load`, from an open file; a tokenizer that is already built is used as it is."""
    memory.share_arenas()
    compile_cache.enable()
    added = adapters.opened(lora or {}, control_vectors or {}, control_layers)
    add = adapters.checked(added, file)
    cfg, params = load_model(
        file, precision=precision, cache_type=cache_type, kernels=kernels, on_bytes=on_bytes
    )
    params = add(params, cfg)
    if tokenizer is None:
        try:
            tokenizer = Tokenizer.from_gguf(file)
        except TokenizerError as e:
            log.info("%s", e)
    known = None if tokenizer is None else max(1, min(tokenizer.n_known, cfg.n_vocab))
    engine = Engine(
        params,
        cfg,
        n_ctx=n_ctx,
        prefill_chunk=prefill_chunk,
        steps_per_dispatch=steps_per_dispatch,
        n_known=known,
    )
    return LanguageModel(engine, tokenizer, file, added)
