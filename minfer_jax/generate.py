"""`python -m minfer_jax.generate [MODEL] [PROMPT]`: answer one prompt.

Standard output carries the generated text alone; everything else goes to standard error.
"""

import contextlib
import dataclasses
import logging as stdlib_logging
import os
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
from absl import app, flags, logging

from minfer_jax import metadata_report, sources
from minfer_jax.engine import Engine, check_prompt_fits
from minfer_jax.generate_flags import Options, UsageError, help_text, parse
from minfer_jax.gguf import GGUFFile, open_gguf
from minfer_jax.language_model import LanguageModel, from_file
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
    # Where the caller has closed them there are none, and print would send one into the other.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # pyright: ignore
    try:
        if any(a in ("-h", "-help", "--help") for a in argv[1:]):
            sys.stdout.write(help_text())
            return 0
        return _run(parse(argv))
    except UsageError as e:
        return _fail(str(e), 2)
    except (ValueError, OSError) as e:
        if isinstance(e, BrokenPipeError):
            # Whoever read our output has gone: let the interpreter's last flush go elsewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _fail(str(e), 1)
    except (MemoryError, jax.errors.JaxRuntimeError) as e:
        if not isinstance(e, MemoryError) and "RESOURCE_EXHAUSTED" not in str(e):
            raise
        return _fail("out of memory; try a smaller model or --n-ctx", 1)
    except KeyboardInterrupt:
        _say("\ninterrupted")
        return 130


def _run(options: Options) -> int:
    if options.threads is not None:
        # XLA's CPU client reads it when it starts, and starts that many threads.
        os.environ["NPROC"] = str(min(options.threads, os.cpu_count() or 1))
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_handler().setFormatter(stdlib_logging.Formatter("note: %(message)s"))

    path = sources.resolve(options.model)
    _say(f"Loading model: {path} ...")
    file = open_gguf(path)
    _describe(file)
    if options.meta:
        _say(metadata_report.metadata(file))
    cfg = read_model_config(file)  # a file that cannot run is refused before anything long begins
    prompt = _read_prompt() if options.prompt is None else options.prompt
    tokenizer = Tokenizer.from_gguf(file)
    ids = encode_prompt(file, tokenizer, prompt, system=options.system, template=options.template)
    if not prompt.strip() or not ids:
        raise UsageError("the prompt is empty; give one as an argument or on standard input")
    check_prompt_fits(len(ids), cfg.n_ctx_train)
    _say(f"Vocabulary: {tokenizer.n_vocab} tokens")
    _say(f"Prompt: {len(ids)} tokens")
    with metadata_report.loading_bar(file) as bar:
        model = from_file(
            file,
            n_ctx=max(options.n_ctx, len(ids)),
            precision=options.precision,
            tokenizer=tokenizer,
            on_bytes=bar,
        )
    _say(f"Loaded: {model.cfg.n_layer} layers")
    _say("Model loaded.")
    if options.meta:
        _say(metadata_report.memory(model.engine))
    return _generate(model, ids, options)


def _generate(model: LanguageModel, ids: list[int], options: Options) -> int:
    """Stream the answer, then report; Ctrl-C ends the one and not the other."""
    engine, status = model.engine, 0
    pieces = model.stream_ids(
        ids,
        max_tokens=engine.n_ctx if options.max_tokens is None else options.max_tokens,
        stop=options.stop,
        **dataclasses.asdict(options.sampling),
    )
    _say("Compiling, or loading what an earlier run compiled ...")
    told = False
    try:
        for piece in pieces:
            if not told:
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
    _say(_rate("Prefill: ", stats.n_prompt, stats.prefill_seconds, stats.prefill_rate))
    return True


def _report(engine: Engine) -> None:
    stats = engine.stats
    total = stats.n_prompt + stats.n_generated
    rate = total / stats.total_seconds if stats.total_seconds else 0.0
    programs = ", ".join(
        f"{c.name} {c.seconds:.2f}s" + " from the cache" * c.cached for c in engine.compiles
    )
    _say("\n---")
    _say(_rate("Generated: ", stats.n_generated, stats.decode_seconds, stats.decode_rate))
    _say(_rate("Total:     ", total, stats.total_seconds, rate))
    _say(f"Compiled: {len(engine.compiles)} programs in {engine.compile_seconds:.2f}s ({programs})")
    _say(f"Finished: {stats.finish_reason}")


def _rate(label: str, n: int, seconds: float, rate: float) -> str:
    return f"{label}{n} tokens in {seconds:.2f}s ({rate:.1f} tok/s)"


def _read_prompt() -> str:
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        _say("Type the prompt, then Ctrl-D:")
    raw = sys.stdin.buffer.read(_LONGEST_PROMPT + 1)
    if len(raw) > _LONGEST_PROMPT:
        raise UsageError(f"standard input holds more than {_LONGEST_PROMPT} bytes; give less")
    return raw.decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")


def _describe(file: GGUFFile) -> None:
    size = sum(part.stat().st_size for part in file.parts)
    _say(f"File: {size} bytes ({size / 2**20:.1f} MB) in {len(file.parts)} part(s)")
    _say(f"GGUF: {len(file.metadata)} KV, {len(file.tensors)} tensors")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it has gone: the answer matters more
        print(line, file=sys.stderr, flush=True)


def _fail(message: str, status: int) -> int:
    _say(f"error: {message}")
    return status


def _exit(status: int) -> None:
    """End the process; after Ctrl-C at once, as jax may not survive a shutdown in mid-compile."""
    if status == 130:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def _keep_arguments(argv: list[str]) -> list[str]:
    """absl wants its own flags parsed; ours are parsed by `main`, with errors in one line."""
    flags.FLAGS(argv[:1])
    return argv


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.run(lambda argv: _exit(main(argv)), flags_parser=_keep_arguments)
