"""The removal of models that were fetched.

What others own is left to them: a model of a store is removed by Ollama, and one of
huggingface_hub's cache by that library's own means, which keep what other models share.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import CachedRevisionInfo, HFCacheInfo, constants, scan_cache_dir

from minfer_jax.sources.cached import HUB, STORE, CachedModel
from minfer_jax.sources.folder import model_dir
from minfer_jax.sources.hub_cache import blob_of
from minfer_jax.sources.record import record_path
from minfer_jax.sources.transfer import SourceError, quoted


def remove(model: CachedModel) -> int:
    """Removes a model, with its records and the folders that are empty then.

    Args:
        model: One of `cached_models`.

    Returns:
        The bytes that are free now.

    Raises:
        SourceError: It is Ollama's, or not where fetched models are.
        OSError: A file cannot be removed.
    """
    if model.owner == STORE:
        name = model.reference.removeprefix("ollama:")
        raise SourceError(f"{model.reference} belongs to Ollama; remove it by: ollama rm {name}")
    if model.owner == HUB:
        return _remove_from_hub(model)
    return sum(map(_remove_file, model.files))


def _remove_from_hub(model: CachedModel) -> int:
    """Removes the files from all revisions of their repository, and the revisions left empty."""
    snapshot = next(path for path in model.files[0].parents if path.parent.name == "snapshots")
    names = [path.relative_to(snapshot) for path in model.files]
    cache, repo = scan_cache_dir(), snapshot.parent.parent.resolve()  # as the library has it
    files = [
        file
        for revision in _revisions(cache, repo)
        for file in revision.files
        if file.file_path.relative_to(revision.snapshot_path) in names
    ]
    blobs = {blob_of(file.file_path) for file in files}
    strategy = cache.delete_files(*files)
    strategy.execute()
    cache = scan_cache_dir()
    empty = [one.commit_hash for one in _revisions(cache, repo) if not one.files]
    if empty:
        cache.delete_revisions(*empty).execute()
    for blob in blobs:
        if not blob.exists():
            record_path(blob).unlink(missing_ok=True)
    return strategy.expected_freed_size


def _revisions(cache: HFCacheInfo, repo: Path) -> Iterable[CachedRevisionInfo]:
    return next((one.revisions for one in cache.repos if one.repo_path == repo), ())


def _remove_file(path: Path) -> int:
    """Removes a fetched file and what is kept beside it; the bytes that frees."""
    inside = Path(os.path.realpath(path.parent))
    folders = (model_dir(), Path(constants.HF_HUB_CACHE))  # the latter has unfinished files of ours
    folder = next((one for one in folders if inside.is_relative_to(os.path.realpath(one))), None)
    if folder is None:
        raise SourceError(f"{quoted(path)} is not below {quoted(model_dir())}; it is not removed")
    freed = 0
    for one in (path, record_path(path)):
        if one.is_symlink() or one.exists():
            freed += one.lstat().st_size
            one.unlink()
    for parent in path.parents:
        if parent == folder or not parent.is_dir() or any(parent.iterdir()):
            break
        parent.rmdir()
    return freed
