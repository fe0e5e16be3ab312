"""Which file of a repository a reference means; the way that llama.cpp's users are used to.

hf:ORG/REPO                the only model of the repository, else the one named Q4_K_M
hf:ORG/REPO:Q8_0           the model whose name ends in -Q8_0 or .Q8_0, in any case of letters
hf:ORG/REPO:FILE.gguf      the model of that file; all parts of it if it is split
hf:ORG/REPO@REV:...        the same, at a branch, tag or commit
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from minfer_jax.sources.folder import listed
from minfer_jax.sources.split import SUFFIX, models_of
from minfer_jax.sources.transfer import SourceError, quoted

DEFAULT_QUANT = "Q4_K_M"
MAIN = "main"
_NO_MODELS = ("mmproj", "imatrix")  # in the names of files that go with a model
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"  # as long as the hub allows
_REPO = rf"{_PART}(?:/{_PART})?"
_REFERENCE = re.compile(
    rf"hf:(?P<repo>{_REPO})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?(?::(?P<wanted>[^\0-\x1f]+))?"
)


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model by its repository.

    Attributes:
        repo: `ORG/REPO`.
        revision: A branch, tag or commit; None if the reference names none.
        wanted: A file, or how its name ends; None for the default.
    """

    repo: str
    revision: str | None
    wanted: str | None


def parse(ref: str) -> HubModel:
    """Reads `hf:ORG/REPO[@REVISION][:QUANT or file]`.

    Raises:
        SourceError: It is none.
    """
    match = _REFERENCE.fullmatch(ref)
    if match is None or ".." in match["repo"] or ".." in (match["revision"] or ""):
        raise SourceError(
            f"{quoted(ref)} is no model of a hub; hf:ORG/REPO, hf:ORG/REPO:QUANT or"
            " hf:ORG/REPO:FILE.gguf is expected"
        )
    return HubModel(repo=match["repo"], revision=match["revision"], wanted=match["wanted"])


def models_among(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The whole models among the files of a repository: base name -> their files, in order.

    A server may say any name; those that would lead out of a folder are passed over.
    """
    return {
        base: files
        for base, files in models_of(names).items()
        if not set(base.split("/")) & {"", ".", ".."}
        and not any(word in PurePosixPath(base).name.lower() for word in _NO_MODELS)
    }


def choose(model: HubModel, names: Iterable[str]) -> tuple[str, ...]:
    """Chooses among the files of a repository.

    Args:
        model: What is wanted.
        names: The files that there are.

    Returns:
        The names of the model's files, in order.

    Raises:
        SourceError: None is meant, or several may be; it lists them.
    """
    models = models_among(names)
    if not models:
        raise SourceError(
            f"{model.repo} holds no whole model as .gguf; look for a repository with GGUF in its"
            " name, or convert it"
        )
    by_file = [files for files in models.values() if model.wanted in files]
    if model.wanted is None and len(models) == 1:
        by_file = list(models.values())
    if by_file:
        return by_file[0]
    ending = (model.wanted or DEFAULT_QUANT).removesuffix(SUFFIX).lower()
    found = [base for base in models if _is_meant(base.lower(), ending)]
    if len(found) == 1:
        return models[found[0]]
    if found:
        problem = f"{quoted(ending)} may be any of {listed(found)} in {model.repo}"
    elif model.wanted is None:
        problem = f"{model.repo} holds several models: {listed(models)}"
    else:
        problem = f"{model.repo} holds no {quoted(model.wanted)}; it holds {listed(models)}"
    raise SourceError(f"{problem}; name one of them: hf:{model.repo}:NAME")


def _is_meant(base: str, ending: str) -> bool:
    name = PurePosixPath(base).name
    return ending in (base, name) or name.endswith((f"-{ending}", f".{ending}"))
