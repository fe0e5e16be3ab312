"""Presets: named arguments for loading a model and for generating, as TOML files.

    about = "programs: the likeliest line"     # what --help-all says of it
    [load]                                     # arguments of minfer_jax.load
    n_ctx = 8192
    [generate]                                 # of generate and stream; those of the sampler too
    temperature = 0.2

So `preset = load("code")` serves `minfer_jax.load(model, **preset.load)` and then
`engine.generate(prompt, **preset.generate)`. The files are in configs/, which is a folder of the
package where that is installed.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_jax.model.precision import PRECISIONS
from minfer_jax.nearest import did_you_mean
from minfer_jax.quant import kernels
from minfer_jax.quant.cache import CACHE_TYPES
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.seed import settled

_LARGEST = 1 << 16  # bytes
_SUFFIX = ".toml"

# What a value may be: its types, and what that is called. A truth value is no number here.
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    str: ((str,), "a text"),
    tuple: ((list,), "a list of texts"),
}
_SAMPLING = {field.name: type(field.default) for field in dataclasses.fields(SamplingParams)}
_KEYS: dict[str, dict[str, type]] = {
    "load": {
        **{"n_ctx": int, "precision": str, "cache_type": str, "prefill_chunk": int},
        **{"kernels": str, "steps_per_dispatch": int},
    },
    "generate": {
        **{"max_tokens": int, "stop": tuple, "system": str, "context_shift": bool, "n_keep": int},
        **_SAMPLING,
    },
}
_LEAST = {"n_ctx": 1, "prefill_chunk": 1, "steps_per_dispatch": 1, "max_tokens": 0, "n_keep": -1}
_CHOICES = {
    "precision": tuple(PRECISIONS),
    "cache_type": tuple(CACHE_TYPES),
    "kernels": kernels.CHOICES,
}


class PresetError(ValueError):
    """A preset that there is not, or that cannot be used. One line."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Values to use in place of the defaults.

    Attributes:
        name: of the preset, or the path of its file.
        about: what it is for, in a line.
        load: arguments of `minfer_jax.load`.
        generate: arguments of `generate` and `stream`.
    """

    name: str
    about: str
    load: Mapping[str, Any]
    generate: Mapping[str, Any]


def names() -> tuple[str, ...]:
    """The presets that come with the package, in the order of the alphabet."""
    return tuple(sorted(path.stem for path in folder().glob(f"*{_SUFFIX}")))


def folder() -> Path:
    """Where they are: in the package, or beside it where it runs from a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def load(name: str | Path) -> Preset:
    """Read a preset.

    Args:
        name: one of `names()`; or the path of a TOML file, which has a slash in it or ends in
            ".toml".

    Raises:
        PresetError: there is no such preset or file; a key is unknown; a value is of another type
            than its key takes, or out of range.
    """
    text = str(name)
    if isinstance(name, Path) or text.endswith(_SUFFIX) or "/" in text or "\\" in text:
        return _read(Path(text), text)
    if text not in names():
        raise PresetError(
            f"there is no preset {text[:40]!r}{did_you_mean(text, names())}: they are"
            f" {', '.join(names())}, or give the path of a {_SUFFIX} file"
        )
    return _read(folder() / f"{text}{_SUFFIX}", text)


def _read(path: Path, name: str) -> Preset:
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
        if len(raw) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes, too many for a preset")
        return _checked(tomllib.loads(raw.decode("utf-8-sig")), name)
    except OSError as e:
        raise PresetError(f"{path}: {e.strerror or e}; a {_SUFFIX} file is expected") from None
    except RecursionError:
        raise PresetError(f"{path}: its values are nested too deeply") from None
    except ValueError as e:
        raise PresetError(f"{path}: {e}") from None


def _checked(found: dict[str, Any], name: str) -> Preset:
    """The preset that a file's contents make. Raises ValueError, without the path."""
    about = found.pop("about", "")
    if not isinstance(about, str):
        raise ValueError(f"about is {_shown(about)}, expected a text")
    for table, values in found.items():
        if table in _KEYS and not isinstance(values, dict):
            raise ValueError(f"{table} is {_shown(values)}, expected a table: [{table}]")
        if table not in _KEYS:
            hint = _elsewhere(table) or did_you_mean(table, _KEYS)
            known = ", ".join(f"[{name}]" for name in _KEYS)
            raise ValueError(f"unknown key {_shown(table)}{hint}: expected are {known} and about")
        for key, value in values.items():
            _check(table, key, value)
    chosen = {table: dict(found.get(table, {})) for table in _KEYS}
    for values in chosen.values():
        for key, value in values.items():
            values[key] = tuple(value) if isinstance(value, list) else value
    sampling = {k: v for k, v in chosen["generate"].items() if k in _SAMPLING}
    if "seed" in sampling:
        sampling["seed"] = settled(sampling["seed"])
    SamplingParams(**sampling)  # refuses what is out of range
    return Preset(name=name, about=about, load=chosen["load"], generate=chosen["generate"])


def _check(table: str, key: str, value: object) -> None:
    if key not in _KEYS[table]:
        hint = _elsewhere(key) or did_you_mean(key, _KEYS[table])
        raise ValueError(
            f"unknown key {_shown(key)} in [{table}]{hint}: known are {', '.join(_KEYS[table])}"
        )
    kind = _KEYS[table][key]
    types, called = _KINDS[kind]
    right = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
    if not right or (isinstance(value, list) and not all(isinstance(v, str) for v in value)):
        raise ValueError(f"{key} is {_shown(value)}, expected {called}")
    if key in _LEAST and isinstance(value, int) and value < _LEAST[key]:
        raise ValueError(f"{key} is {value}, expected {_LEAST[key]} or more")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ValueError(f"{key} is {_shown(value)}, expected one of {', '.join(_CHOICES[key])}")


def _elsewhere(key: str) -> str:
    return "".join(f"; it belongs in [{table}]" for table, keys in _KEYS.items() if key in keys)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
