"""The removal of models that were fetched.

What others own is left to them: a model of a store is removed by Ollama, and one of
huggingface_hub's cache by that library's own means, which keep what other models share.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import CachedRevisionInfo, HFCacheInfo, constants

from minfer_jax import ollama_source
from minfer_jax.cached_models import HUB, STORE, CachedModel, hub_cache
from minfer_jax.file_record import record_path
from minfer_jax.hf_cache import record_place
from minfer_jax.model_folder import model_dir
from minfer_jax.transfer import SourceError, quoted


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
    repo_path = snapshot.parent.parent
    cache = hub_cache()
    if cache is None:
        return 0
    files = [
        file
        for revision in _revisions(cache, repo_path)
        for file in revision.files
        if file.file_path.relative_to(revision.snapshot_path) in names
    ]
    strategy = cache.delete_files(*files)
    strategy.execute()
    cache = hub_cache()
    empty = [] if cache is None else [r for r in _revisions(cache, repo_path) if not r.files]
    if cache is not None and empty:
        cache.delete_revisions(*(revision.commit_hash for revision in empty)).execute()
    repo = model.reference.removeprefix("hf:").partition(":")[0].partition("@")[0]
    for name in names:
        _remove_file(record_place(model_dir(), repo, name.as_posix()))
    return strategy.expected_freed_size


def _revisions(cache: HFCacheInfo, repo_path: Path) -> Iterable[CachedRevisionInfo]:
    return next((repo.revisions for repo in cache.repos if repo.repo_path == repo_path), ())


def _remove_file(path: Path) -> int:
    """Removes a fetched file and what is kept beside it; the bytes that frees."""
    inside = Path(os.path.realpath(path.parent))
    folders = (model_dir(), Path(constants.HF_HUB_CACHE))  # the latter has unfinished files of ours
    folder = next((one for one in folders if inside.is_relative_to(os.path.realpath(one))), None)
    if folder is None:
        raise SourceError(f"{quoted(path)} is not below {quoted(model_dir())}; it is not removed")
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
