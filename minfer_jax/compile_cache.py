"""XLA's persistent compile cache: on by default, one folder a compiler version and processor."""

import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path

import jax
import jaxlib.version

log = logging.getLogger("minfer_jax")

VARIABLE = "MINFER_COMPILE_CACHE"
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
    folder = (Path(wanted) if wanted else _user_folder()) / _compiler_and_cpu()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        log.warning("no compile cache: cannot write to %s (%s)", folder, e.strerror or e)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _user_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # no home folder is known
        home = Path(tempfile.gettempdir())
    return home / "minfer" / "compile"


def _compiler_and_cpu() -> str:
    """Compiled code runs only on a processor with the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((x for x in lines if x.lower().startswith(("flags", "features"))), "")
    except OSError:
        cpu = platform.processor()
    digest = hashlib.sha256(f"{platform.machine()} {cpu}".encode()).hexdigest()[:12]
    return f"jaxlib-{jaxlib.version.__version__}-{digest}"
