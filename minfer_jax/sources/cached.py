"""The models that are on this machine, by the references that find them.

They lie in the cache folder, in huggingface_hub's cache, and in stores of Ollama.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minfer_jax.sources import ollama
from minfer_jax.sources.aliases import ALIASES
from minfer_jax.sources.folder import files_below, model_dir
from minfer_jax.sources.hub_cache import (
    digest_of,
    files_of,
    partial_files,
    repositories,
    snapshots,
)
from minfer_jax.sources.hub_choice import HubModel, models_among
from minfer_jax.sources.record import PART, read_record, source_of
from minfer_jax.sources.references import resolve
from minfer_jax.sources.split import SUFFIX, all_parts, models_of
from minfer_jax.sources.transfer import SourceError, quoted

CACHE, HUB, STORE, UNFINISHED = "cache", "hub", "ollama", "unfinished"


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A model on this machine.

    Attributes:
        reference: What finds it.
        owner: CACHE: the cache folder; HUB: huggingface_hub; STORE: Ollama; or UNFINISHED: an
            interrupted fetch of the one or the other.
        files: Its files, in order.
        digests: The sha256 of each, in hex, or None where it is not known.
    """

    reference: str
    owner: str
    files: tuple[Path, ...]
    digests: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)


def cached_models() -> list[CachedModel]:
    """All models on this machine, sorted by reference."""
    found = [*_in_cache(), *_in_hub(), *_in_stores(), *_unfinished()]
    return sorted(found, key=lambda model: (model.reference, model.files))


def model_of(path: Path) -> CachedModel | None:
    """The model whose first file is at a path; None where it is none of these."""
    place = _place(path)
    return next((model for model in cached_models() if _place(model.files[0]) == place), None)


def find(ref: str) -> CachedModel:
    """The model, a damaged one too, or the remains of an interrupted fetch, that a reference means.

    Raises:
        SourceError: It means none, or a file that was not fetched.
    """
    listed = [one for one in cached_models() if one.reference == ref]
    unfinished = next((one for one in listed if one.owner == UNFINISHED), None)
    if unfinished is not None:
        return unfinished
    try:
        path = resolve(ref, may_fetch=False)
    except SourceError:
        if not listed:
            raise
        return listed[0]
    found = model_of(path)
    if found is None:
        raise SourceError(f"{quoted(path)} was not fetched, and is left alone")
    return found


def _place(path: Path) -> Path:
    """A path with no links in its folders; of itself a file of the hub's cache is one."""
    return Path(os.path.realpath(path.parent), path.name)


def _in_cache() -> Iterator[CachedModel]:
    folder = model_dir()
    aliases = {row.file_name: alias for alias, row in ALIASES.items()}
    for base, names in models_of(map(Path.as_posix, files_below(folder, SUFFIX))).items():
        files = tuple(folder / name for name in names)
        records = [read_record(path) for path in files]
        digests = tuple(None if record is None else record.sha256 for record in records)
        alias = aliases.get(names[0])
        yield CachedModel(
            reference=alias or (records[0].source if records[0] else base),
            owner=CACHE,
            files=files,
            digests=digests if alias is None else (ALIASES[alias].sha256,),
        )


def _in_stores() -> Iterator[CachedModel]:
    for model, path in ollama.stored():
        digest = path.name.removeprefix("sha256-")
        yield CachedModel(reference=model.reference, owner=STORE, files=(path,), digests=(digest,))


def _in_hub() -> Iterator[CachedModel]:
    """Of a repository's revisions, a model is listed for each that has it, main's without @."""
    for repo in repositories():
        folders = snapshots(HubModel(repo=repo, revision=None, wanted=None))
        for number, snapshot in enumerate(folders):
            at = f"@{snapshot.name}" if number else ""
            for base, names in models_among(files_of(snapshot)).items():
                paths = tuple(snapshot / name for name in names)
                yield CachedModel(
                    reference=f"hf:{repo}{at}:{names[0] if len(names) == 1 else base}",
                    owner=HUB,
                    files=paths,
                    digests=tuple(map(digest_of, paths)),
                )


def _unfinished() -> Iterator[CachedModel]:
    """What interrupted fetches have left, by the reference that goes on with them."""
    folder = model_dir()
    parts = [folder / path for path in files_below(folder, f"{SUFFIX}{PART}")]
    found: dict[str, list[Path]] = {}
    for path in (*parts, *partial_files()):
        found.setdefault(source_of(path) or path.name, []).append(path)
    for path in files_below(folder, SUFFIX):  # parts of a split, without the others
        source = source_of(folder / path)
        if source and not all(map(os.path.exists, map(folder.joinpath, all_parts(str(path))))):
            found.setdefault(source, []).append(folder / path)
    for source, paths in found.items():
        files = tuple(sorted(paths))
        yield CachedModel(
            reference=source, owner=UNFINISHED, files=files, digests=(None,) * len(files)
        )
