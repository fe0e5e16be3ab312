"""`python -m minfer_jax.generate [MODEL] [PROMPT]`: answer one prompt.

Standard output carries the generated text alone; everything else goes to standard error.
"""

import dataclasses
import gc
import logging as stdlib_logging
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # what a start makes stays: to search it for garbage takes 0.2 s, and finds none

from absl import app, flags, logging

from minfer_jax import host, metadata_report, sources
from minfer_jax.command import guarded, leave, say, with_flags
from minfer_jax.context import check_prompt_fits
from minfer_jax.engine import Engine
from minfer_jax.generate_flags import Options, UsageError, help_text, parse
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.language_model import LanguageModel, from_file
from minfer_jax.model.config import MAX_POSITIONS
from minfer_jax.model.load import read_model_config
from minfer_jax.prompt import encode_prompt
from minfer_jax.tokenizer import Tokenizer

_LONGEST_PROMPT = 64 << 20  # bytes of standard input


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and positional arguments.

    Returns:
        The exit status: 0, 1 for a model or prompt that cannot be run, 2 for wrong usage, 130 for
        Ctrl-C.
    """
    return guarded(lambda: with_flags(argv, help_text, parse, _run))


def _run(options: Options) -> int:
    host.use_threads(options.threads)
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().setFormatter(stdlib_logging.Formatter("note: %(message)s"))

    path = sources.resolve(options.model)
    say(f"Loading model: {path} ...")
    file = open_gguf(path)
    _describe(file)
    if options.meta:
        say(metadata_report.metadata(file))
    # A file that cannot run so is refused before anything long begins.
    cfg = read_model_config(file, options.precision, options.cache_type)
    prompt = _read_prompt() if options.prompt is None else options.prompt
    tokenizer = Tokenizer.from_gguf(file)
    ids = encode_prompt(file, tokenizer, prompt, system=options.system, template=options.template)
    if not prompt.strip() or not ids:
        raise UsageError("the prompt is empty; give one as an argument or on standard input")
    check_prompt_fits(len(ids), cfg.n_ctx_train)
    say(f"Vocabulary: {tokenizer.n_vocab} tokens")
    say(f"Prompt: {len(ids)} tokens")
    with metadata_report.loading_bar(file) as bar:
        model = from_file(
            file,
            n_ctx=max(options.n_ctx, len(ids)),
            precision=options.precision,
            cache_type=options.cache_type,
            prefill_chunk=options.prefill_chunk,
            tokenizer=tokenizer,
            on_bytes=bar,
        )
    say(f"Loaded: {model.cfg.n_layer} layers")
    say("Model loaded.")
    if options.meta:
        say(metadata_report.memory(model.engine))
    return _generate(model, ids, options)


def _generate(model: LanguageModel, ids: list[int], options: Options) -> int:
    """Stream the answer, then report; Ctrl-C ends the one and not the other."""
    engine, status = model.engine, 0
    pieces = model.stream_ids(
        ids,
        max_tokens=MAX_POSITIONS if options.max_tokens is None else options.max_tokens,
        stop=options.stop,
        context_shift=options.context_shift,
        n_keep=options.keep,
        **dataclasses.asdict(options.sampling),
    )
    say("Compiling, or loading what an earlier run compiled ...")
    told = False
    try:
        for piece in pieces:
            if not told:
                gc.freeze()
                gc.enable()
                told = _say_prefill(engine)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        engine.stats.finish_reason = "interrupted"
        status = 130
    if not told:
        _say_prefill(engine)
    if sys.stdout.isatty():
        sys.stdout.write("\n")
        sys.stdout.flush()
    _report(engine)
    return status


def _say_prefill(engine: Engine) -> bool:
    stats = engine.stats
    say(_rate("Prefill: ", stats.n_prefilled, stats.prefill_seconds, stats.prefill_rate))
    return True


def _report(engine: Engine) -> None:
    stats = engine.stats
    total = stats.n_prefilled + stats.n_generated
    rate = total / stats.total_seconds if stats.total_seconds else 0.0
    programs = ", ".join(
        f"{c.name} {c.seconds:.2f}s" + " from the cache" * c.cached for c in engine.compiles
    )
    say("\n---")
    say(_rate("Generated: ", stats.n_generated, stats.decode_seconds, stats.decode_rate))
    say(_rate("Total:     ", total, stats.total_seconds, rate))
    say(f"Compiled: {len(engine.compiles)} programs in {engine.compile_seconds:.2f}s ({programs})")
    if stats.n_dropped:
        say(f"Dropped: {stats.n_dropped} tokens, as the context was full")
    say(f"Finished: {stats.finish_reason}")


def _rate(label: str, n: int, seconds: float, rate: float) -> str:
    return f"{label}{n} tokens in {seconds:.2f}s ({rate:.1f} tok/s)"


def _read_prompt() -> str:
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        say("Type the prompt, then Ctrl-D:")
    raw = sys.stdin.buffer.read(_LONGEST_PROMPT + 1)
    if len(raw) > _LONGEST_PROMPT:
        raise UsageError(f"standard input holds more than {_LONGEST_PROMPT} bytes; give less")
    return raw.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")


def _describe(file: GGUFFile) -> None:
    size = sum(part.stat().st_size for part in file.parts)
    say(f"File: {size} bytes ({size / 2**20:.1f} MB) in {len(file.parts)} part(s)")
    say(f"GGUF: {len(file.metadata)} KV, {len(file.tensors)} tensors")


def _keep_arguments(argv: list[str]) -> list[str]:
    """absl wants its own flags parsed; ours are parsed by `main`, with errors in one line."""
    flags.FLAGS(argv[:1])
    return argv


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.run(lambda argv: leave(lambda: main(argv)), flags_parser=_keep_arguments)
