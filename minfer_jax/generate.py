"""`python -m minfer_jax.generate [MODEL] [PROMPT]`: answer one prompt.

Standard output carries the generated text alone; everything else goes to standard error.
"""

import dataclasses
import gc
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # what a start makes stays: to search it for garbage takes 0.2 s, and finds none

from absl import app, flags

from minfer_jax.command import guarded, leave, say, with_flags
from minfer_jax.context import check_prompt_fits
from minfer_jax.engine import Engine
from minfer_jax.generate_flags import Options, help_text, parse
from minfer_jax.language_model import LanguageModel
from minfer_jax.model.config import MAX_POSITIONS
from minfer_jax.model_command import loaded, opened
from minfer_jax.prompt import encode_prompt
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.usage import UsageError

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
    common = options.common
    file, cfg = opened(common)
    prompt = _read_prompt() if common.prompt is None else common.prompt
    tokenizer = Tokenizer.from_gguf(file)
    ids = encode_prompt(file, tokenizer, prompt, system=common.system, template=options.template)
    if not prompt.strip() or not ids:
        raise UsageError("the prompt is empty; give one as an argument or on standard input")
    check_prompt_fits(len(ids), cfg.n_ctx_train)
    say(f"Vocabulary: {tokenizer.n_vocab} tokens")
    say(f"Prompt: {len(ids)} tokens")
    model = loaded(file, tokenizer, common, max(common.n_ctx, len(ids)))
    return _generate(model, ids, options)


def _generate(model: LanguageModel, ids: list[int], options: Options) -> int:
    """Stream the answer, then report; Ctrl-C ends the one and not the other."""
    engine, common, status = model.engine, options.common, 0
    pieces = model.stream_ids(
        ids,
        max_tokens=MAX_POSITIONS if common.max_tokens is None else common.max_tokens,
        stop=common.stop,
        context_shift=options.context_shift,
        n_keep=options.keep,
        **dataclasses.asdict(common.sampling),
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


def _keep_arguments(argv: list[str]) -> list[str]:
    """absl wants its own flags parsed; ours are parsed by `main`, with errors in one line."""
    flags.FLAGS(argv[:1])
    return argv


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.run(lambda argv: leave(lambda: main(argv)), flags_parser=_keep_arguments)
