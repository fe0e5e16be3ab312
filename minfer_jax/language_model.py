"""Text in, text out: an engine with its tokenizer."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from minfer_jax import compile_cache, memory, sources
from minfer_jax.engine import MAX_TOKENS, N_CTX, Engine, RunStats
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.load import load_model
from minfer_jax.model.params import Params
from minfer_jax.prompt import Messages, encode_prompt
from minfer_jax.sampling import SamplingParams
from minfer_jax.stop_strings import StopStrings
from minfer_jax.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("minfer_jax")


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

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        system: str | None = None,
        template: bool | None = None,
        **sampling: float,
    ) -> Iterator[str]:
        """The answer, piece by piece.

        Args:
            prompt: see `encode_prompt`, as `system` and `template`.
            max_tokens: how many tokens to draw at most.
            stop: strings that end the text; they are not part of it.
            system: a system message.
            template: whether to use the chat template.
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
            **sampling,
        )

    def stream_ids(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] | str = (),
        **sampling: float,
    ) -> Iterator[str]:
        """As `stream`, for a prompt that is tokens already."""
        tokenizer = self._known_tokenizer()
        chosen = {"repeat_penalty": SamplingParams.repeat_penalty, **sampling}
        tokens = self.engine.generate_tokens(
            token_ids, max_tokens, stop_ids=tokenizer.eog_ids, **chosen
        )
        return self._text(tokens, tokenizer, StopStrings(stop))

    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(f"{self.file.path}: no tokenizer that is known; give token ids")
        return self.tokenizer

    def _text(
        self, tokens: Iterator[int], tokenizer: Tokenizer, stops: StopStrings
    ) -> Iterator[str]:
        decoder = tokenizer.stream_decoder(continues=True)
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
    on_bytes: Callable[[int], None] = lambda n: None,
) -> LanguageModel:
    """Load a model.

    Args:
        model: a reference that `sources.resolve` knows: a path, an alias such as "smollm2", a
            cached name.
        n_ctx: positions of context, bounded by what the model was made for.
        precision: "highest" is float32 throughout; "default" is what is fast here.
        on_bytes: called with the size of each weight that was read, for a progress bar.

    Raises:
        ValueError: one line: the reference leads nowhere (SourceError), the file is broken
            (GGUFError), or cannot be run (ModelError), or an argument is out of range.
    """
    file = open_gguf(sources.resolve(model))
    return from_file(file, n_ctx=n_ctx, precision=precision, on_bytes=on_bytes)


def from_file(
    file: GGUFFile,
    *,
    n_ctx: int = N_CTX,
    precision: str = "default",
    tokenizer: Tokenizer | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> LanguageModel:
    """As `load`, from an open file; a tokenizer that is already built is used as it is."""
    memory.share_arenas()
    compile_cache.enable()
    cfg, params = load_model(file, precision=precision, on_bytes=on_bytes)
    engine = Engine(params, cfg, n_ctx=n_ctx)
    if tokenizer is None:
        try:
            tokenizer = Tokenizer.from_gguf(file)
        except TokenizerError as e:
            log.info("%s", e)
    return LanguageModel(engine, tokenizer, file)
