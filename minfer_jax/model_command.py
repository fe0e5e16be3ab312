"""What every command that talks to a model begins with: the file is opened, then loaded."""

import logging as stdlib_logging
from pathlib import Path

from absl import logging

from minfer_jax import device, host, metadata_report, sources
from minfer_jax.command import say
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.gguf_header import one_line
from minfer_jax.language_model import LanguageModel, from_file
from minfer_jax.model.config import ModelConfig
from minfer_jax.model.load import read_model_config
from minfer_jax.model_flags import ModelOptions
from minfer_jax.tokenizer import Tokenizer


def show_notes() -> None:
    """Let warnings of the log come to standard error, a line each."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().setFormatter(stdlib_logging.Formatter("note: %(message)s"))


def opened(options: ModelOptions) -> tuple[GGUFFile, ModelConfig]:
    """Open the file of a model and say what it is.

    Args:
        options: as the command line has them.

    Raises:
        ValueError: there is no such device (DeviceError), the reference leads nowhere
            (SourceError), the file is broken (GGUFError), or cannot be run so (ModelError): told
            before anything long begins.
    """
    host.use_threads(options.threads)
    show_notes()
    device.use(options.device, options.kernels)
    if options.seed_drawn:
        say(f"Seed: {options.sampling.seed}")
    path = _path(options)
    say(f"Loading model: {one_line(str(path))} ...")
    file = open_gguf(path)
    size = sum(part.stat().st_size for part in file.parts)
    say(f"File: {size} bytes ({size / 1e6:.1f} MB) in {len(file.parts)} part(s)")
    say(f"GGUF: {len(file.metadata)} KV, {len(file.tensors)} tensors")
    if options.meta:
        say(metadata_report.metadata(file))
    cfg = read_model_config(file, options.precision, options.cache_type, options.kernels)
    return file, cfg


def _path(options: ModelOptions) -> Path:
    try:
        return sources.resolve(options.model)
    except sources.SourceError as e:
        word = options.model
        if not options.alone or not word.strip() or any(c in word for c in "/\\:"):
            raise
        raise sources.SourceError(
            f"{e}. One word alone is the MODEL; where it is the prompt, give the model too:"
            f" {sources.DEFAULT_MODEL} {word[:40]!r}"
        ) from None


def loaded(
    file: GGUFFile, tokenizer: Tokenizer, options: ModelOptions, n_ctx: int
) -> LanguageModel:
    """Load the weights, with a bar on a terminal, and say so.

    Args:
        file: as `opened` has given it.
        tokenizer: its tokenizer.
        options: as the command line has them.
        n_ctx: positions of context.

    Raises:
        ValueError: the weights cannot be loaded (ModelError).
    """
    with metadata_report.loading_bar(file) as bar:
        model = from_file(
            file,
            n_ctx=n_ctx,
            precision=options.precision,
            cache_type=options.cache_type,
            prefill_chunk=options.prefill_chunk,
            kernels=options.kernels,
            steps_per_dispatch=options.steps_per_dispatch,
            lora=options.lora,
            control_vectors=options.control_vectors,
            control_layers=options.control_layers,
            tokenizer=tokenizer,
            on_bytes=bar,
        )
    say(f"Loaded: {model.cfg.n_layer} layers")
    for kind, files in (("LoRA", options.lora), ("Control vector", options.control_vectors)):
        for name, scale in files.items():
            say(f"{kind}: {name} x {scale:g}")
    say("Model loaded.")
    if options.meta:
        say(metadata_report.memory(model.engine))
    return model
