"""Where models come from: references, and the files that they stand for, fetched where need be."""

from minfer_jax.sources.aliases import ALIASES, DEFAULT_MODEL
from minfer_jax.sources.folder import model_dir
from minfer_jax.sources.references import resolve
from minfer_jax.sources.transfer import SourceError

__all__ = ["ALIASES", "DEFAULT_MODEL", "SourceError", "model_dir", "resolve"]
