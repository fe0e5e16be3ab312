"""`python -m minfer_jax.generate [MODEL] [PROMPT]`: answer one prompt.

Standard output carries the generated text alone; everything else goes to standard error.
"""

import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # what a start makes stays: to search it for garbage takes 0.2 s, and finds none

from absl import app

from minfer_jax.command import guarded, keep_arguments, leave, say, shown, with_flags
from minfer_jax.context import check_prompt_fits
from minfer_jax.dump_flags import DUMP, TRACE, Dumps, asked
from minfer_jax.engine import Engine
from minfer_jax.generate_flags import Options, conversation, help_all, help_text, parse
from minfer_jax.gguf import GGUFFile
from minfer_jax.json_lines import sample_line, token_line
from minfer_jax.language_model import LanguageModel
from minfer_jax.model.config import MAX_POSITIONS
from minfer_jax.model_command import loaded, opened
from minfer_jax.model_flags import ModelOptions
from minfer_jax.prompt import encode_prompt
from minfer_jax.prompt_file import STANDARD_INPUT, read_text
from minfer_jax.run_options import Drawn
from minfer_jax.speculation import Drafter
from minfer_jax.tokenizer import Tokenizer
from minfer_jax.usage import UsageError


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and positional arguments.

    Returns:
        The exit status: 0, 1 for a model or prompt that cannot be run, 2 for wrong usage, 130 for
        Ctrl-C. With --cnv, that of `chat`.
    """
    if (chat_argv := conversation(argv)) is not None:
        from minfer_jax import chat  # which a single answer need not wait for

        return chat.main(chat_argv)
    return guarded(lambda: with_flags(argv, help_text, parse, _run, help_all))


def _run(options: Options) -> int:
    common = options.common
    told = asked(os.environ)
    _check_dumps(told, options)
    options.graph.check()
    if common.prompt is not None:
        _check_prompt(common.prompt)  # nothing is fetched or read for no prompt
    file, cfg = opened(common)
    prompt = _typed_prompt() if common.prompt is None else common.prompt
    tokenizer = Tokenizer.from_gguf(file)
    ids = encode_prompt(file, tokenizer, prompt, system=common.system, template=options.template)
    check_prompt_fits(len(ids), cfg.n_ctx_train)
    say(f"Vocabulary: {tokenizer.n_vocab} tokens")
    say(f"Prompt: {len(ids)} tokens")
    draft = None if options.draft is None else opened(_of_draft(options))[0]
    model = loaded(file, tokenizer, common, max(common.n_ctx, len(ids)))
    if options.graph.wanted:
        from minfer_jax.graph_dump import write_graphs  # which an answer need not wait for

        write_graphs(model, ids, options.graph)
        return 0
    if options.samples > 1:
        pieces = _samples(model, prompt, options)
    else:
        extra = {} if draft is None else {"draft": _drafter(model, draft, options)}
        pieces = _answer(model, tokenizer, ids, options, extra)
    status = _reported(model.engine, pieces)
    if told.wanted:
        from minfer_jax.dumps import tell  # likewise

        tell(model, told, common.sampling, prompt, ids)
    return status


def _check_dumps(told: Dumps, options: Options) -> None:
    """Refuse what cannot be told of a run."""
    if told.rerun and (options.samples > 1 or options.context_shift):
        name = "samples" if options.samples > 1 else "context-shift"
        raise UsageError(f"{TRACE} and {DUMP} tell of one whole text: leave out --{name}")


def _of_draft(options: Options) -> ModelOptions:
    """The same for the draft model."""
    model = options.draft or options.common.model
    return dataclasses.replace(
        options.common, model=model, alone=False, meta=False, seed_drawn=False
    )


def _drafter(model: LanguageModel, draft: GGUFFile, options: Options) -> Drafter:
    """The draft model, loaded for the same context."""
    tokenizer = Tokenizer.from_gguf(draft)
    smaller = loaded(draft, tokenizer, _of_draft(options), model.engine.n_ctx)
    most = {} if options.draft_max is None else {"most": options.draft_max}
    return model.drafter(smaller, **most)


def _answer(
    model: LanguageModel,
    tokenizer: Tokenizer,
    ids: list[int],
    options: Options,
    extra: dict[str, Any],
) -> Iterator[str]:
    """The answer as it comes: its text, or a line of JSON for each token."""
    drawn: list[Drawn] = []
    if options.logprobs is not None:
        extra = {**extra, "n_logprobs": options.logprobs, "on_drawn": drawn.append}
    pieces = model.stream_ids(
        ids,
        context_shift=options.context_shift,
        n_keep=options.keep,
        **_arguments(options),
        **extra,
    )
    if options.logprobs is None:
        return pieces
    return _token_lines(pieces, drawn, tokenizer)


def _token_lines(pieces: Iterator[str], drawn: list[Drawn], tokenizer: Tokenizer) -> Iterator[str]:
    """A line for each token that was drawn until now, whether or not it completes a piece."""
    for _ in pieces:
        yield "".join(f"{token_line(one, tokenizer)}\n" for one in drawn)
        drawn.clear()
    yield "".join(f"{token_line(one, tokenizer)}\n" for one in drawn)


def _samples(model: LanguageModel, prompt: str, options: Options) -> Iterator[str]:
    """Several answers, a line of JSON each."""
    texts = model.generate_many(
        prompt,
        options.samples,
        system=options.common.system,
        template=options.template,
        **_arguments(options),
    )
    for i, (text, reason) in enumerate(zip(texts, model.stats.finish_reasons, strict=True)):
        yield f"{sample_line(i, text, reason)}\n"


def _arguments(options: Options) -> dict[str, Any]:
    common = options.common
    return {
        "max_tokens": MAX_POSITIONS if common.max_tokens is None else common.max_tokens,
        "stop": common.stop,
        **dataclasses.asdict(common.sampling),
        **options.extra,
    }


def _reported(engine: Engine, pieces: Iterator[str]) -> int:
    """Write the pieces, then report; Ctrl-C ends the one and not the other."""
    status = 0
    say("Compiling, or loading what an earlier run compiled ...")
    told = False
    try:
        for piece in pieces:
            if not told:
                gc.freeze()
                gc.enable()
                told = _say_prefill(engine)
            sys.stdout.write(shown(piece))
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
    say(
        f"Compiled: {len(engine.compiles)} programs in {engine.compile_seconds:.2f}s"
        + f" ({programs})" * bool(programs)
    )
    if stats.n_drafted:
        share = f"{stats.acceptance:.0%}"
        say(f"Drafted: {stats.n_drafted} tokens, {stats.n_accepted} of them right ({share})")
    if stats.n_dropped:
        say(f"Dropped: {stats.n_dropped} tokens, as the context was full")
    say(f"Finished: {stats.finish_reason}")


def _rate(label: str, n: int, seconds: float, rate: float) -> str:
    return f"{label}{n} tokens in {seconds:.2f}s ({rate:.1f} tok/s)"


def _typed_prompt() -> str:
    """What is on standard input: last of all, as a person may have to write it."""
    if sys.stdin is not None and sys.stdin.isatty():
        say("Type the prompt, then Ctrl-D:")
    prompt = read_text(STANDARD_INPUT)
    _check_prompt(prompt)
    return prompt


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise UsageError("the prompt is empty; give one as an argument or on standard input")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app.run(lambda argv: leave(lambda: main(argv)), flags_parser=keep_arguments)
