"""The models that are on this machine, by the references that find them, and their removal.

They lie in the cache folder, in huggingface_hub's cache, and in stores of Ollama. What others own
is left to them: a model of a store is removed by Ollama, and one of huggingface_hub's cache by that
library's own means, which keep what other models share.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minfer_jax import ollama_source
from minfer_jax.file_record import read_record, record_path
from minfer_jax.hf_choice import MAIN
from minfer_jax.model_folder import model_dir, model_files, parts_of
from minfer_jax.sources import ALIASES
from minfer_jax.split_files import all_parts, base_name, models_of
from minfer_jax.transfer import SourceError, quoted

CACHE, HUB, STORE = "cache", "hub", "ollama"  # whose a model is


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A model on this machine.

    Attributes:
        reference: What finds it.
        owner: CACHE, HUB or STORE.
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
    """All models on this machine, sorted by reference; huggingface_hub is loaded for its cache."""
    found = [*_in_cache(), *_in_hub(), *_in_stores()]
    return sorted(found, key=lambda model: (model.reference, model.files))


def model_of(path: Path) -> CachedModel | None:
    """The model whose first file is at a path; None where it is none of these."""
    place = _place(path)
    return next((model for model in cached_models() if _place(model.files[0]) == place), None)


def _place(path: Path) -> Path:
    """A path with no links in its folders; of itself a file of the hub's cache is one."""
    return Path(os.path.realpath(path.parent), path.name)


def remove(model: CachedModel) -> int:
    """Removes a model, with its records and the folders that are empty then.

    Args:
        model: One of `cached_models`.

    Returns:
        The bytes that are free now.

    Raises:
        SourceError: It is Ollama's.
        OSError: A file cannot be removed.
    """
    if model.owner == STORE:
        name = model.reference.removeprefix("ollama:")
        raise SourceError(f"{model.reference} belongs to Ollama; remove it by: ollama rm {name}")
    if model.owner == HUB:
        return _remove_from_hub(model)
    return sum(_remove_file(path, model_dir()) for path in model.files)


def _in_cache() -> Iterator[CachedModel]:
    folder = model_dir()
    aliases = {Path(row.file_name): alias for alias, row in ALIASES.items()}
    for first in model_files(folder):
        files = tuple(parts_of(folder / first))
        if not files or len(files) < len(all_parts(first.name)):
            continue  # a link to nothing, or a split that is not whole
        records = [read_record(path) for path in files]
        source = None if records[0] is None else records[0].source
        alias = aliases.get(first)
        yield CachedModel(
            reference=alias or source or base_name(first.as_posix()),
            owner=CACHE,
            files=files,
            digests=(ALIASES[alias].sha256,)
            if alias
            else tuple(None if record is None else record.sha256 for record in records),
        )


def _in_stores() -> Iterator[CachedModel]:
    for model, path in ollama_source.stored():
        digest = path.name.removeprefix("sha256-")
        yield CachedModel(reference=model.reference, owner=STORE, files=(path,), digests=(digest,))


def _in_hub() -> Iterator[CachedModel]:
    """Of a repository's revisions, a model is listed for each that has it, main's without @."""
    from minfer_jax.hf_source import digest_of  # slow to import, as all of huggingface_hub

    for repo in _hub_repos():
        plain = next((r for r in repo.revisions if MAIN in r.refs), None)
        if plain is None and repo.revisions:
            plain = max(repo.revisions, key=lambda revision: revision.last_modified)
        for revision in repo.revisions:
            at = "" if revision is plain else f"@{revision.commit_hash}"
            folder = revision.snapshot_path
            names = [file.file_path.relative_to(folder).as_posix() for file in revision.files]
            for base, files in models_of(names).items():
                paths = tuple(folder / name for name in files)
                yield CachedModel(
                    reference=f"hf:{repo.repo_id}{at}:{files[0] if len(files) == 1 else base}",
                    owner=HUB,
                    files=paths,
                    digests=tuple(map(digest_of, paths)),
                )


def _hub_repos() -> list:
    """huggingface_hub's CachedRepoInfo of each model; none where there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except (CacheNotFound, ValueError):  # ValueError: a file is in its place
        return []


def _remove_from_hub(model: CachedModel) -> int:
    """Removes the files from all revisions of their repository, and the revisions left empty."""
    from huggingface_hub import scan_cache_dir

    from minfer_jax.hf_source import record_place

    snapshot = next(path for path in model.files[0].parents if path.parent.name == "snapshots")
    names = [path.relative_to(snapshot) for path in model.files]
    repo_path = snapshot.parent.parent

    def revisions_of(cache):
        return next((repo.revisions for repo in cache.repos if repo.repo_path == repo_path), ())

    cache = scan_cache_dir()
    files = [
        file
        for revision in revisions_of(cache)
        for file in revision.files
        if file.file_path.relative_to(revision.snapshot_path) in names
    ]
    strategy = cache.delete_files(*files)
    strategy.execute()
    cache = scan_cache_dir()
    empty = [one.commit_hash for one in revisions_of(cache) if not one.files]
    if empty:
        cache.delete_revisions(*empty).execute()
    repo = model.reference.removeprefix("hf:").partition(":")[0].partition("@")[0]
    for name in names:
        _remove_file(record_place(model_dir(), repo, name.as_posix()), model_dir())
    return strategy.expected_freed_size


def _remove_file(path: Path, folder: Path) -> int:
    """Removes a file below the cache folder and what is kept beside it; the bytes that frees."""
    inside = os.path.realpath(path.parent)
    if not Path(inside).is_relative_to(os.path.realpath(folder)):
        raise SourceError(f"{quoted(path)} is not below {quoted(folder)}; it is not removed")
    freed = 0
    for one in (path, record_path(path), ollama_source.manifest_path(path)):
        if one.is_symlink() or one.exists():
            freed += one.lstat().st_size
            one.unlink()
    for parent in path.parents:
        if parent == folder or not parent.is_dir() or any(parent.iterdir()):
            break
        parent.rmdir()
    return freed
