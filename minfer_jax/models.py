"""`python -m minfer_jax.models list|info|download|rm`: the models on this machine.

Standard output carries what was asked for alone; everything else goes to standard error.
"""

import json
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from minfer_jax import model_report, sources
from minfer_jax.command import guarded, leave, say, with_flags
from minfer_jax.gguf import open_gguf
from minfer_jax.gguf_header import one_line
from minfer_jax.model_report import decimal
from minfer_jax.models_flags import DOWNLOAD, INFO, LIST, RM, Options, help_text, parse
from minfer_jax.sources.cached import UNFINISHED, CachedModel, cached_models, find, model_of
from minfer_jax.sources.transfer import shown


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and positional arguments.

    Returns:
        The exit status: 0, 1 for a model that cannot be found, fetched, read or removed, 2 for
        wrong usage, 130 for Ctrl-C.
    """
    return guarded(lambda: with_flags(argv, help_text, parse, _run))


def _run(options: Options) -> int:
    return {LIST: _list, INFO: _info, DOWNLOAD: _download, RM: _rm}[options.command](options)


def _list(options: Options) -> int:
    models = cached_models()
    if options.json:
        print(json.dumps([_as_json(model) for model in models], indent=1))
        return 0
    if not models:
        say(f"no models yet; python -m minfer_jax.models download {sources.DEFAULT_MODEL}")
    names = [one_line(model.reference) for model in models]
    width = max(map(len, names), default=0)
    for name, model in zip(names, models, strict=True):
        note = "  unfinished" if model.owner == UNFINISHED else ""
        print(f"{name:<{width}}  {decimal(model.size):>9}{note}")
    return 0


def _as_json(model: CachedModel) -> dict:
    return {
        "reference": model.reference,
        "size": model.size,
        "files": [str(path) for path in model.files],
        "owner": model.owner,
    }


def _info(options: Options) -> int:
    (ref,) = options.models
    file = open_gguf(sources.resolve(ref, may_fetch=False))  # a look fetches nothing
    report = model_report.report(file, shown(ref))
    if options.verify:
        model = model_of(file.parts[0])
        digests = (None,) * len(file.parts) if model is None else model.digests
        report["sha256"] = model_report.verify(file.parts, digests)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print(model_report.as_text(report))
        print(model_report.details(file))
    return 0


def _download(options: Options) -> int:
    for ref in options.models:
        print(sources.resolve(ref), flush=True)
    return 0


def _rm(options: Options) -> int:
    from minfer_jax.sources.remove import remove  # loads huggingface_hub

    freed = 0
    for ref in options.models:
        model = find(ref)
        if options.force or _confirmed(model):
            freed += remove(model)
    say(f"{decimal(freed)} freed")
    return 0


def _confirmed(model: CachedModel) -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise sources.SourceError(
            f"{model.reference} ({decimal(model.size)}) is only removed when asked on a terminal,"
            " or with --force"
        )
    sys.stderr.write(f"remove {one_line(model.reference)} ({decimal(model.size)})? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    leave(lambda: main(sys.argv))
