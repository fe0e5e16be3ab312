"""The command: a model is loaded or a trace checked, then the page is served."""

from collections.abc import Sequence

from minfer_jax.command import guarded, say, with_flags
from minfer_jax.viz.flags import Options, help_text, parse
from minfer_jax.viz.hub import Hub
from minfer_jax.viz.routes import VizServer
from minfer_jax.viz.stored import check_trace


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the program's name, flags and positional arguments.

    Returns:
        The exit status: 1 for a model or a trace that cannot be shown, or a port that is taken, 2
        for wrong usage, 130 for Ctrl-C, which is how it ends.
    """
    return guarded(lambda: with_flags(argv, help_text, parse, _run))


def _run(options: Options) -> int:
    if options.trace is not None:
        check_trace(options.trace)
    hub, live = Hub(), None
    if options.model is not None:
        from minfer_jax.viz.loading import live_model  # with jax, which a trace does not need

        live = live_model(options.model, hub.publish)
    with VizServer(options.port, hub, live=live, trace=options.trace) as server:
        say(f"Open http://127.0.0.1:{server.port}/ in a browser on this machine; Ctrl-C ends it.")
        server.serve_forever()
    return 0
