"""A local web page that shows a model at work: `python -m minfer_jax.viz`.

Its routes and events are minfer's, with some more in them; see `routes` and `live`.
"""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the command, see `start`."""
    from minfer_jax.viz import start  # with all that it needs: `__main__` minds Ctrl-C first

    return start.main(argv)
