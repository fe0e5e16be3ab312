"""`python -m minfer_jax.viz [MODEL | --trace FILE]`: a page that shows a model at work."""

import signal
import sys

if __name__ == "__main__":  # Ctrl-C during the imports below ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from minfer_jax.command import leave
from minfer_jax.viz.start import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave(lambda: main(sys.argv))
