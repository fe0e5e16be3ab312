"""The model of a page: opened and loaded as the other commands do."""

from minfer_jax.model_command import loaded, opened
from minfer_jax.model_flags import ModelOptions
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.viz.live import Live, Publish


def live_model(options: ModelOptions, publish: Publish) -> Live:
    """Load a model.

    Args:
        options: as the command line has them.
        publish: takes the events of its runs.

    Raises:
        ValueError: it cannot be opened, has no tokenizer that is known, or cannot be loaded.
    """
    file, _ = opened(options)
    tokenizer = Tokenizer.from_gguf(file)
    return Live(loaded(file, tokenizer, options, options.n_ctx), tokenizer, publish)
