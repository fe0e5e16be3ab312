"""`python -m minfer_jax.compare A B`: two models, quantisations or precisions on one text.

Tables go to standard output, all else to standard error. `divergence` says how rows are held
against each other, `perplexity` what windows a text is run in, `compare_layers` where in the model
the two part.
"""

import json
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from tqdm import tqdm

from minfer_jax import (
    compare_layers,
    compare_plot,
    device,
    host,
    metadata_report,
    plotting,
    sources,
)
from minfer_jax.command import guarded, leave, say, with_flags
from minfer_jax.compare_flags import Options, Spec, help_text, parse
from minfer_jax.compare_report import Comparison, as_json, as_text
from minfer_jax.context import CHUNK, EngineError
from minfer_jax.divergence import joined
from minfer_jax.draft_model import check_same_vocabulary
from minfer_jax.engine import Engine
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.gguf_header import one_line
from minfer_jax.language_model import LanguageModel, from_file
from minfer_jax.model.load import read_model_config
from minfer_jax.model_command import show_notes
from minfer_jax.perplexity import Window, run, whole_text, windows
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.whole_file import check_apart, replacing

_LOGITS = 1 << 25  # in memory at once, of each model: 128 MiB
_STEP = 512  # n_ctx is a multiple of this, so that texts share programs


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and models.

    Returns:
        The exit status: 0, 1 for what cannot be run or written, 2 for wrong usage, 130 for Ctrl-C.
    """
    return guarded(lambda: with_flags(argv, help_text, parse, _run))


def _run(options: Options) -> int:
    if options.plot is not None:
        plotting.check(options.plot)
    host.use_threads(options.threads)
    for spec in options.specs:
        device.use(options.device, spec.kernels)
    show_notes()
    found = _compared(options)
    try:
        sys.stdout.write(as_text(found, options.worst))
        sys.stdout.flush()
    finally:  # where nobody reads the table, the files are wanted still
        if options.json is not None:
            with replacing(options.json, shared=True) as file:
                file.write((json.dumps(as_json(found), allow_nan=False) + "\n").encode())
        if options.plot is not None:
            compare_plot.draw(found, options.plot)
    return 0


def _compared(options: Options) -> Comparison:
    paths = [sources.resolve(spec.model) for spec in options.specs]
    opened = {path: open_gguf(path) for path in paths}
    files = [opened[path] for path in paths]
    check_apart(
        [path for path in (options.json, options.plot) if path is not None],
        [*(part for file in files for part in file.parts), *options.files],
    )
    configs = [
        read_model_config(file, spec.precision, spec.cache_type, spec.kernels)
        for file, spec in zip(files, options.specs, strict=True)
    ]
    tokenizers = {path: Tokenizer.from_gguf(file) for path, file in opened.items()}
    tokenizer, *others = (tokenizers[path] for path in paths)
    for other in others:
        check_same_vocabulary(tokenizer.tokens, other.tokens, options.specs[1].name)
    cut = _windows(options, tokenizer, min(cfg.n_ctx_train for cfg in configs))
    fits = max(1, _LOGITS // max(cfg.n_vocab for cfg in configs))
    chunk = min(CHUNK, 1 << fits.bit_length() - 1)
    n_ctx = -(-len(cut[0].ids) // _STEP) * _STEP
    models = [
        _load(file, spec, tokenizers[path], n_ctx, chunk)
        for file, spec, path in zip(files, options.specs, paths, strict=True)
    ]
    engines = [model.engine for model in models]
    parts, total = [], sum(len(window.targets) for window in cut)
    with tqdm(total=total, unit="tok", leave=False, disable=not sys.stderr.isatty()) as bar:
        for window in cut:
            for part in run(engines, window):
                parts.append(part)
                bar.update(len(part))
    return Comparison(
        models=[_about(spec, engine) for spec, engine in zip(options.specs, engines, strict=True)],
        tokenizer=tokenizer,
        windows=cut,
        positions=joined(parts),
        layers=_layers(engines, cut[0].ids[:chunk].tolist()) if options.layers else None,
    )


def _windows(options: Options, tokenizer: Tokenizer, most: int) -> list[Window]:
    """What is run of the text.

    Args:
        options: as the command line has them.
        tokenizer: of the first model.
        most: positions that both models have.

    Raises:
        EngineError: the text is too short; a window is longer than the models were made for.
    """
    ids = tokenizer.encode(options.text, add_bos=tokenizer.add_bos)
    if options.perplexity:
        if options.n_ctx > most:
            raise EngineError(
                f"a window has {options.n_ctx} tokens, and the model {most} positions: lower "
                "--n-ctx"
            )
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        return windows(ids, options.n_ctx, bos, options.chunks)
    most = min(most, options.n_ctx)
    if len(ids) > most:
        say(f"The text has {len(ids)} tokens: the first {most} are compared")
    return [whole_text(ids[:most])]


def _load(
    file: GGUFFile, spec: Spec, tokenizer: Tokenizer, n_ctx: int, chunk: int
) -> LanguageModel:
    say(f"Loading model: {one_line(f'{file.path} ({spec.name})')} ...")
    with metadata_report.loading_bar(file) as bar:
        return from_file(
            file,
            n_ctx=n_ctx,
            precision=spec.precision,
            cache_type=spec.cache_type,
            kernels=spec.kernels,
            prefill_chunk=chunk,
            tokenizer=tokenizer,
            on_bytes=bar,
        )


def _about(spec: Spec, engine: Engine) -> dict[str, str]:
    names = {dtype: name for name, dtype in CACHE_TYPES.items()}
    cfg = engine.cfg
    return {
        "name": spec.name,
        "precision": cfg.precision,
        "cache_type": names[cfg.cache_dtype],
        "kernels": cfg.arithmetic.kernels,
    }


def _layers(engines: Sequence[Engine], ids: list[int]) -> compare_layers.Layers | None:
    if not compare_layers.alike(engines):
        say("The layers are not compared: the models differ in their number, or in width")
        return None
    return compare_layers.layers(engines, ids)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    leave(lambda: main(sys.argv))
