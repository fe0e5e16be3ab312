"""The models that are on this machine, by the references that find them.

They lie in the cache folder, in huggingface_hub's cache, and in stores of Ollama.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minfer_jax import ollama_source
from minfer_jax.file_record import PART, read_record, source_of
from minfer_jax.hf_cache import digest_of, partial_files
from minfer_jax.hf_choice import MAIN, models_among
from minfer_jax.model_folder import files_below, model_dir, model_files, parts_of
from minfer_jax.sources import ALIASES, resolve
from minfer_jax.split_files import SUFFIX, all_parts, base_name
from minfer_jax.transfer import SourceError, quoted

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

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
    """All models on this machine, sorted by reference; huggingface_hub is loaded for its cache."""
    found = [*_in_cache(), *_in_hub(), *_in_stores(), *_unfinished()]
    return sorted(found, key=lambda model: (model.reference, model.files))


def model_of(path: Path) -> CachedModel | None:
    """The model whose first file is at a path; None where it is none of these."""
    place = _place(path)
    return next((model for model in cached_models() if _place(model.files[0]) == place), None)


def find(ref: str) -> CachedModel:
    """The model, or the remains of an interrupted fetch, that a reference means.

    Raises:
        SourceError: It means none, or a file that was not fetched.
    """
    unfinished = next((one for one in _unfinished() if one.reference == ref), None)
    if unfinished is not None:
        return unfinished
    path = resolve(ref, may_fetch=False)
    found = model_of(path)
    if found is None:
        raise SourceError(f"{quoted(path)} was not fetched, and is left alone")
    return found


def _place(path: Path) -> Path:
    """A path with no links in its folders; of itself a file of the hub's cache is one."""
    return Path(os.path.realpath(path.parent), path.name)


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
    cache = hub_cache()
    for repo in () if cache is None else cache.repos:
        if repo.repo_type != "model":
            continue
        plain = next((r for r in repo.revisions if MAIN in r.refs), None)
        if plain is None and repo.revisions:
            plain = max(repo.revisions, key=lambda revision: revision.last_modified)
        for revision in repo.revisions:
            at = "" if revision is plain else f"@{revision.commit_hash}"
            folder = revision.snapshot_path
            names = [file.file_path.relative_to(folder).as_posix() for file in revision.files]
            for base, files in models_among(names).items():
                paths = tuple(folder / name for name in files)
                yield CachedModel(
                    reference=f"hf:{repo.repo_id}{at}:{files[0] if len(files) == 1 else base}",
                    owner=HUB,
                    files=paths,
                    digests=tuple(map(digest_of, paths)),
                )


def hub_cache() -> "HFCacheInfo | None":
    """What huggingface_hub has in its cache; None where there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except (CacheNotFound, ValueError):  # ValueError: a file is in its place
        return None


def _unfinished() -> Iterator[CachedModel]:
    """What interrupted fetches have left, by the reference that goes on with them."""
    folder = model_dir()
    parts = [folder / path for path in files_below(folder, f"{SUFFIX}{PART}")]
    found: dict[str, list[Path]] = {}
    for path in (*parts, *partial_files()):
        found.setdefault(source_of(path) or path.name, []).append(path)
    for path in files_below(folder, SUFFIX):
        record = read_record(folder / path)
        if record and len(parts_of(folder / path)) < len(all_parts(path.name)):
            found.setdefault(record.source, []).append(folder / path)
    for source, paths in found.items():
        files = tuple(sorted(paths))
        yield CachedModel(
            reference=source, owner=UNFINISHED, files=files, digests=(None,) * len(files)
        )
