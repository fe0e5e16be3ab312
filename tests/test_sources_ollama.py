"""Models of Ollama: its store on this machine, and a registry."""

import json

import pytest

from minfer_jax.sources import SourceError, ollama, resolve
from minfer_jax.sources.record import Record, read_record
from tests.helpers.servers import Fault, put_in_store, put_ollama, sha256

BODY = b"GGUF of a model"


@pytest.fixture
def registry(server, model_folder, monkeypatch):
    monkeypatch.setenv("MINFER_OLLAMA_REGISTRY", server.url + "/")
    return server


def test_a_model_is_fetched_once(registry, model_folder, capfd):
    put_ollama(registry, "library/tiny", "1b-q4", BODY)
    path = resolve("ollama:tiny:1b-q4")
    assert path == model_folder / "ollama/tiny/1b-q4.gguf"
    assert path.read_bytes() == BODY
    record = Record(size=len(BODY), sha256=sha256(BODY), source="ollama:tiny:1b-q4")
    assert read_record(path) == record
    assert "docker.distribution.manifest" in registry.requests[0].headers["accept"]
    err = capfd.readouterr().err
    assert err == f"fetching 1b-q4.gguf (0 MB) from 127.0.0.1 into {model_folder}\n"
    registry.close()
    assert resolve("ollama:tiny:1b-q4") == resolve("ollama:tiny:1b-q4", may_fetch=False) == path


def test_names(registry, model_folder):
    put_ollama(registry, "library/tiny", "latest", BODY)
    put_ollama(registry, "someone/tiny", "v1.0", BODY)
    assert resolve("ollama:tiny") == model_folder / "ollama/tiny/latest.gguf"
    assert resolve("ollama:someone/tiny:v1.0") == model_folder / "ollama/someone/tiny/v1.0.gguf"


def test_a_blob_is_fetched_again_where_it_broke_off(registry, model_folder):
    put_ollama(registry, "library/tiny", "latest", BODY * 100)
    registry.faults[f"/v2/library/tiny/blobs/sha256:{sha256(BODY * 100)}"] = [Fault(after=7)]
    assert resolve("ollama:tiny").read_bytes() == BODY * 100
    assert registry.ranges() == [None, None, "bytes=7-"]


@pytest.mark.parametrize("served", [b"GGUF of anotherm", BODY[:-1] + b"?"])
def test_a_blob_that_is_another(registry, model_folder, served):
    put_ollama(registry, "library/tiny", "latest", BODY)
    registry.file(f"/v2/library/tiny/blobs/sha256:{sha256(BODY)}", served)
    with pytest.raises(SourceError, match=r"is expected|are expected"):
        resolve("ollama:tiny")
    assert not list(model_folder.rglob("*.gguf"))


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({}, r"manifest of ollama:tiny:latest cannot be used: one layer with a model is expected"),
        ({"layers": []}, r"one layer with a model"),
        ({"layers": [1]}, r"one layer with a model"),
        ({"layers": None}, r"one layer with a model"),
        ({"digest": "md5:1"}, r"no sha256 and size"),
        ({"digest": "sha256:../../../../x"}, r"no sha256 and size"),
        ({"size": -1}, r"no sha256 and size"),
        ({"size": "1"}, r"no sha256 and size"),
    ],
)
def test_odd_manifests(registry, model_folder, manifest, message):
    layer = {"mediaType": ollama._MODEL, "digest": f"sha256:{'0' * 64}", "size": 1}
    if "layers" not in manifest and manifest:
        manifest = {"layers": [layer | manifest]}
    registry.file("/v2/library/tiny/manifests/latest", json.dumps(manifest).encode())
    with pytest.raises(SourceError, match=message):
        resolve("ollama:tiny")


def test_a_login_of_the_registry_is_not_shown(registry, model_folder, monkeypatch):
    monkeypatch.setenv("MINFER_OLLAMA_REGISTRY", registry.url.replace("//", "//user:secret@"))
    place = "/v2/library/tiny/manifests/latest"
    registry.faults[place] = [Fault(status=404), Fault(status=403)]
    for body in (b"", b"", b"{", b"[]", b"{}", b" " * (5 << 20)):
        registry.file(place, body)
        with pytest.raises(SourceError) as caught:
            resolve("ollama:tiny")
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    put_ollama(registry, "library/tiny", "latest", BODY)
    path = resolve("ollama:tiny")
    assert b"secret" not in b"".join(p.read_bytes() for p in model_folder.rglob("*.json"))
    assert path.read_bytes() == BODY


def test_no_such_model(registry, model_folder):
    with pytest.raises(SourceError, match=r"no model ollama:none:latest in the registry http://"):
        resolve("ollama:none")
    registry.faults["/v2/library/none/manifests/latest"] = [Fault(status=401)]
    with pytest.raises(SourceError, match=r"127.0.0.1 answers 401 Unauthorized for"):
        resolve("ollama:none")
    with pytest.raises(SourceError, match=r"'ollama:none' is not in the cache; this fetches"):
        resolve("ollama:none", may_fetch=False)


@pytest.mark.parametrize(
    "ref", ["ollama:", "ollama:a:", "ollama::b", "ollama:../x", "ollama:a/b/c", "ollama:a/../b:c",
            "ollama:a:b/c", "ollama:a\n", "ollama:a b", "ollama:-x"],
)  # fmt: skip
def test_what_is_no_reference(model_folder, ref):
    with pytest.raises(SourceError, match=r"is no Ollama model; ollama:NAME:TAG or"):
        resolve(ref)


def test_a_store_s_file_is_used_where_it_lies(registry, tmp_path):
    manifest = put_ollama(registry, "library/tiny", "latest", BODY)
    blob = put_in_store(tmp_path / "ollama", "library/tiny", "latest", BODY, manifest)
    put_in_store(tmp_path / "ollama", "me/tiny", "mine", BODY, manifest)
    assert resolve("ollama:tiny") == resolve("ollama:me/tiny:mine", may_fetch=False) == blob
    assert registry.requests == []
    blob.write_bytes(BODY[:-1])  # Ollama is fetching it
    assert resolve("ollama:tiny") != blob


def test_the_usual_places_of_a_store(model_folder, tmp_path, monkeypatch, server):
    monkeypatch.delenv("OLLAMA_MODELS")
    manifest = put_ollama(server, "library/tiny", "latest", BODY)
    store = tmp_path / "home/.ollama/models"
    assert resolve_error("ollama:tiny")
    blob = put_in_store(store, "library/tiny", "latest", BODY, manifest)
    (store / "manifests/registry.ollama.ai/library/tiny/odd").write_text("no JSON")
    (store / "manifests/registry.ollama.ai/library/tiny/nested").mkdir()
    assert resolve("ollama:tiny", may_fetch=False) == blob


def resolve_error(ref: str) -> str:
    with pytest.raises(SourceError) as caught:
        resolve(ref, may_fetch=False)
    return str(caught.value)
