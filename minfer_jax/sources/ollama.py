"""Models of Ollama: from a store that is on this machine, or else from a registry.

    STORE/manifests/registry.ollama.ai/library/NAME/TAG    JSON: layers, one of them the model
    STORE/blobs/sha256-HEX                                 the model, a GGUF file

    https://registry.ollama.ai/v2/library/NAME/manifests/TAG
    https://registry.ollama.ai/v2/library/NAME/blobs/sha256:HEX
    --> FOLDER/ollama/NAME/TAG.gguf, and its record

A store's file is used where it lies. The protocol is that of a registry of containers, see the
distribution specification of the Open Container Initiative.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from minfer_jax.sources.folder import expanded
from minfer_jax.sources.record import is_present, read_json
from minfer_jax.sources.transfer import SourceError, not_cached, quoted, shown

HOST = "registry.ollama.ai"
REGISTRY = "MINFER_OLLAMA_REGISTRY"  # names another registry
_STORE = "OLLAMA_MODELS"
_STORES = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
_MODEL = "application/vnd.ollama.image.model"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MAX_MANIFESTS = 10_000
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_REFERENCE = re.compile(rf"ollama:(?:(?P<user>{_PART})/)?(?P<name>{_PART})(?::(?P<tag>{_PART}))?")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class OllamaModel:
    """A model by its name.

    Attributes:
        user: Whose it is; "library" for those of Ollama itself.
        name: Its name.
        tag: Which of its versions.
    """

    user: str
    name: str
    tag: str

    @property
    def reference(self) -> str:
        """`ollama:NAME:TAG`, or `ollama:USER/NAME:TAG`."""
        user = "" if self.user == "library" else f"{self.user}/"
        return f"ollama:{user}{self.name}:{self.tag}"


def parse(ref: str) -> OllamaModel:
    """Reads `ollama:[USER/]NAME[:TAG]`.

    Raises:
        SourceError: It is none.
    """
    match = _REFERENCE.fullmatch(ref)
    if match is None:
        raise SourceError(
            f"{quoted(ref)} is no Ollama model; ollama:NAME:TAG or ollama:USER/NAME:TAG is expected"
        )
    return OllamaModel(
        user=match["user"] or "library", name=match["name"], tag=match["tag"] or "latest"
    )


def resolve(ref: str, folder: Path, *, may_fetch: bool = True) -> Path:
    """Finds the file of an Ollama model, and fetches it where need be.

    Args:
        ref: `ollama:[USER/]NAME[:TAG]`; the tag is "latest" if left out.
        folder: The cache folder.
        may_fetch: Whether the network may be used.

    Returns:
        The path: in a local store of Ollama, or in the cache folder.

    Raises:
        SourceError: There is no such model, or it cannot be fetched, or may not be and is not here.
    """
    model = parse(ref)
    for found, path in stored():
        if found == model:
            return path
    user = () if model.user == "library" else (model.user,)
    path = folder.joinpath("ollama", *user, model.name, f"{model.tag}.gguf")
    if is_present(path):
        return path
    if not may_fetch:
        raise not_cached(ref)
    return _fetch(model, path, folder)


def stored() -> Iterator[tuple[OllamaModel, Path]]:
    """The models in the stores of Ollama on this machine, whole ones only, with their files."""
    chosen = os.environ.get(_STORE)
    for store in map(expanded, (chosen,) if chosen else _STORES):
        manifests = (store / "manifests" / HOST).glob("*/*/*")
        for path in sorted(islice(manifests, _MAX_MANIFESTS)):
            user, name, tag = path.parts[-3:]
            try:
                sha256, size = _model_layer(read_json(path))
                blob = store / "blobs" / f"sha256-{sha256}"
                whole = blob.stat().st_size == size
            except (OSError, ValueError):  # half removed, or of another form: as if not there
                continue
            if whole:
                yield OllamaModel(user=user, name=name, tag=tag), blob


def _model_layer(manifest: Any) -> tuple[str, int]:
    """Digest and size of the only model among a manifest's layers; ValueError if it is not so."""
    try:
        layers = [one for one in manifest["layers"] if one["mediaType"] == _MODEL]
        (layer,) = layers
        digest, size = _DIGEST.fullmatch(layer["digest"]), layer["size"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("one layer with a model is expected") from error
    if digest is None or type(size) is not int or size <= 0:
        raise ValueError("the model's layer has no sha256 and size")
    return digest[1], size


def _fetch(model: OllamaModel, path: Path, folder: Path) -> Path:
    from minfer_jax.sources.http_client import HttpError, get_json  # slow to import
    from minfer_jax.sources.http_fetch import Remote, fetch

    registry = os.environ.get(REGISTRY) or f"https://{HOST}"
    base = f"{registry.rstrip('/')}/v2/{model.user}/{model.name}"
    try:
        sha256, size = _model_layer(
            get_json(f"{base}/manifests/{model.tag}", {"Accept": _MANIFEST})
        )
    except HttpError as error:
        if error.status != 404:
            raise
        raise SourceError(
            f"no model {model.reference} in the registry {shown(registry)}; https://ollama.com/library"
            " lists the models and their tags"
        ) from error
    except SourceError:
        raise
    except ValueError as error:
        raise SourceError(f"the manifest of {model.reference} cannot be used: {error}") from error
    remote = Remote(
        url=f"{base}/blobs/sha256:{sha256}",
        source=model.reference,
        size=size,
        sha256=sha256,
    )
    return fetch(remote, path, folder)
