"""Compiled programs, kept whole beside XLA's compile cache.

That cache is looked into only after a program was traced and lowered, which takes four times as
long as to load what it finds. Here a program is found by what went into it: its arguments' shapes,
the configuration, this package's own source, and whatever else decides what is compiled.

An entry is a sha256 of all that follows, and a pickle of what jax serialises. One that is damaged
or does not load is as good as none. Like XLA's own, the entries are code: the folder is the user's.

Only programs for the CPU are kept: of those `machine` below tells all that they depend on. On other
devices there is more to it (driver, compute capability, what the compiler measured), which XLA's
cache takes care of and serves.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import pickle
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib.version
from jax.experimental import serialize_executable

from minfer_jax import host, whole_file
from minfer_jax.quant import native

log = logging.getLogger("minfer_jax")

MAX_ENTRIES = 64  # half a megabyte each; the oldest go
_DIGEST_BYTES = 32


# What may go wrong with an entry that another process or version has written, or cannot be written.
_FAILURES = (
    *(OSError, EOFError, ImportError, AttributeError, LookupError, TypeError, ValueError),
    *(RuntimeError, pickle.PickleError),
)


def find(made_of: object, arguments: tuple) -> Path | None:
    """Where a program is kept, whether or not it is there.

    Args:
        made_of: what it is made of besides its arguments; its repr tells everything that matters.
        arguments: of the program: arrays, or what stands for their shapes and dtypes. The first is
            on the device where it runs.

    Returns:
        A path; None where nothing is kept: no compile cache on this machine's disk, or a device
        other than a CPU.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    device = _device(arguments)
    if not folder or "://" in folder or device.platform != "cpu":
        return None
    leaves, structure = jax.tree.flatten(arguments)
    shapes = [(a.shape, str(a.dtype), getattr(a, "weak_type", False)) for a in leaves]
    no_part = ("jax_platforms",)  # where else a program might have run
    settings = sorted(
        (k, v) for k, v in jax.config.values.items() if "cache" not in k and k not in no_part
    )
    machine = (
        *(host.cpu_name(), len(host.processors()), len(jax.devices()), device.id, native.isa()),
        *(os.environ.get(name) for name in ("XLA_FLAGS", "NPROC")),
    )
    key = repr((made_of, shapes, str(structure), settings, machine, _software()))
    return Path(folder) / "programs" / hashlib.sha256(key.encode()).hexdigest()


@functools.cache
def _software() -> str:
    """A digest of this package's source, and the versions of all that compiled code depends on."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    versions = (jax.__version__, jaxlib.version.__version__, platform.python_version())
    return f"{digest.hexdigest()} {versions} {native.stamp()}"


@contextlib.contextmanager
def instead_of_xla_s(path: Path | None) -> Iterator[None]:
    """While in it, XLA's cache takes no program, if it is to be kept here.

    XLA cannot write down again what it has read, so a program that it kept could not come to be
    kept here.
    """
    setting = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[setting]
    jax.config.update(setting, math.inf if path else before)
    try:
        yield
    finally:
        jax.config.update(setting, before)


def _device(arguments: tuple):
    return next(iter(jax.tree.leaves(arguments)[0].devices()))


def load(path: Path, arguments: tuple) -> jax.stages.Compiled | None:
    """The program that is kept there; None where there is none that can be used.

    Args:
        path, arguments: as for `find`.
    """
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            return None
        program, returns = pickle.loads(data[_DIGEST_BYTES:])
        takes = jax.tree.structure((arguments, {}))
        return serialize_executable.deserialize_and_load(
            program, takes, returns, execution_devices=[_device(arguments)]
        )
    except FileNotFoundError:
        return None
    except _FAILURES as e:
        log.debug("%s: not used (%s)", path, e)
        return None


def save(path: Path, program: jax.stages.Compiled) -> None:
    """Keep a program; where that cannot be done, it is compiled again the next time."""
    try:
        kept, _, returns = serialize_executable.serialize(program)
        data = pickle.dumps((kept, returns))
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file.replacing(path, durable=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        entries = sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
        for old in entries[MAX_ENTRIES:]:
            old.unlink(missing_ok=True)
    except _FAILURES as e:
        log.debug("%s: not kept (%s)", path, e)
