"""XLA's persistent compile cache: on by default, one folder a compiler version and processor."""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import jax
import jaxlib.version

from minfer_jax import host

log = logging.getLogger("minfer_jax")

VARIABLE = "MINFER_COMPILE_CACHE"
EVERYTHING = {  # settings of jax that let every program into its cache
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
OFF = frozenset({"off", "0", "none"})


def enable() -> Path | None:
    """Turn the cache on for this process.

    $MINFER_COMPILE_CACHE may name another folder, or be "off". A cache that the user configured
    through jax itself (JAX_COMPILATION_CACHE_DIR) is left alone.

    Returns:
        The folder, or None where the cache is off or the folder cannot be written (which is
        logged).
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted.lower() in OFF:
        return None
    if configured := jax.config.values["jax_compilation_cache_dir"]:
        return Path(configured)
    folder = Path(wanted or f"{host.CACHE}/compile") / _compiler_and_cpu()
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as e:  # RuntimeError: no home folder is known
        why = e.strerror if isinstance(e, OSError) and e.strerror else e
        log.warning("no compile cache: cannot write to %s (%s)", folder, why)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, value in EVERYTHING.items():
        jax.config.update(name, value)
    return folder


def _compiler_and_cpu() -> str:
    """Compiled code runs only on a processor with the same instructions."""
    digest = hashlib.sha256(host.cpu_name().encode()).hexdigest()[:12]
    return f"jaxlib-{jaxlib.version.__version__}-{digest}"
