"""What is on this machine, and its removal."""

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from minfer_jax.sources import ALIASES, SourceError, resolve
from minfer_jax.sources.cached import CachedModel, cached_models, find, model_of
from minfer_jax.sources.record import Record, write_record
from minfer_jax.sources.remove import remove
from tests.helpers.servers import COMMIT, Fault, put_in_store, put_ollama, put_repo, sha256

BODY = b"GGUF of a model"
REPO = "org/tiny-GGUF"
SPLIT = tuple(f"s-0000{part}-of-00002.gguf" for part in (1, 2))
FILES = {"m-Q4_K_M.gguf": BODY, "m-Q8_0.gguf": BODY + BODY, **{name: BODY for name in SPLIT}}


@pytest.fixture
def hub(hub, store):
    """A hub with one repository."""
    put_repo(hub, store, REPO, FILES)
    return hub


def put(folder: Path, *names: str, source: str | None = None) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(BODY)
        if source is not None:
            write_record(path, Record(size=len(BODY), sha256=sha256(BODY), source=source))


def listed() -> dict[str, int]:
    return {model.reference: model.size for model in cached_models()}


def everything_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_nothing(model_folder):
    assert cached_models() == []
    assert not model_folder.exists()


def test_what_is_listed(hub, server, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_OLLAMA_REGISTRY", server.url)
    put_ollama(server, "library/tiny", "1b", BODY)
    put_ollama(server, "me/tiny", "latest", BODY)
    manifest = put_ollama(server, "library/stored", "latest", BODY)
    put_in_store(tmp_path / "ollama", "library/stored", "latest", BODY, manifest)
    url = server.file("/x/m-00001-of-00002.gguf", BODY)
    server.file("/x/m-00002-of-00002.gguf", BODY)
    for ref in ("ollama:tiny:1b", "ollama:me/tiny", url, f"hf:{REPO}:Q8_0", f"hf:{REPO}:s"):
        resolve(ref)
    put(model_folder, "plain.gguf", "sub/other.gguf", "half-00001-of-00002.gguf")
    put(model_folder, ALIASES["smollm2"].file_name)
    put(model_folder, "pypi/a-1.0/m.gguf", source="pypi:a==1.0/a/m.gguf")
    put(model_folder, ".fetch-x/m.gguf")
    assert listed() == {
        f"hf:{REPO}:m-Q8_0.gguf": 30,
        f"hf:{REPO}:s": 30,
        url: 30,
        "ollama:me/tiny:latest": 15,
        "ollama:stored:latest": 15,
        "ollama:tiny:1b": 15,
        "plain": 15,
        "pypi:a==1.0/a/m.gguf": 15,
        "smollm2": 15,
        "sub/other": 15,
    }
    server.close()
    for model in cached_models():  # each is found by its reference
        if model.reference not in ("smollm2", "pypi:a==1.0/a/m.gguf"):
            path = resolve(model.reference, may_fetch=False)
            found = model_of(path)
            assert found is not None and found.reference == model.reference
            known = (None,) if model.reference in ("plain", "sub/other") else (sha256(BODY),)
            if "Q8_0" not in model.reference:
                assert set(model.digests) == set(known)
    assert [m.reference for m in cached_models()] == sorted(listed())


def test_revisions_are_told_apart(hub, store):
    resolve(f"hf:{REPO}")
    put_repo(hub, store, REPO, {"m-Q4_K_M.gguf": b"GGUF better"}, "f" * 40)
    resolve(f"hf:{REPO}@main")  # is here, though older
    resolve(f"hf:{REPO}@{'f' * 40}")
    plain, other = f"hf:{REPO}:m-Q4_K_M.gguf", f"hf:{REPO}@{'f' * 40}:m-Q4_K_M.gguf"
    assert listed() == {plain: 15, other: 11}
    assert resolve(other, may_fetch=False).parent.name == "f" * 40
    assert resolve(plain, may_fetch=False).parent.name == COMMIT


def test_a_fetched_model_is_removed_with_all_that_belongs_to_it(server, model_folder, monkeypatch):
    monkeypatch.setenv("MINFER_OLLAMA_REGISTRY", server.url)
    put_ollama(server, "library/tiny", "latest", BODY)
    url = server.file("/x/y/m-00001-of-00002.gguf", BODY)
    server.file("/x/y/m-00002-of-00002.gguf", BODY)
    put(model_folder, "plain.gguf", "sub/other.gguf")
    before = everything_below(model_folder)
    resolve("ollama:tiny")
    resolve(url)
    assert remove(find(url)) > 30
    assert remove(find("ollama:tiny")) > 15
    assert [name for name in everything_below(model_folder) if ".locks" not in name] == before
    assert remove(find("other")) == 15
    assert not (model_folder / "sub").exists()


def test_what_a_link_points_to_is_kept(model_folder, tmp_path):
    put(tmp_path, "outside/m.gguf", "outside/deep/n.gguf")
    model_folder.mkdir()
    (model_folder / "m.gguf").symlink_to(tmp_path / "outside/m.gguf")
    (model_folder / "linked").symlink_to(tmp_path / "outside/deep")
    remove(find("m"))
    assert not os.path.lexists(model_folder / "m.gguf")
    assert (tmp_path / "outside/m.gguf").read_bytes() == BODY
    assert cached_models() == []  # folders behind links are not looked into
    path = model_folder / "linked" / "n.gguf"
    forged = CachedModel(reference="n", owner="cache", files=(path,), digests=(None,))
    with pytest.raises(SourceError, match=r"is not below .*; it is not removed"):
        remove(forged)
    assert path.exists()


def test_a_store_s_model_is_left_to_ollama(server, model_folder, tmp_path):
    manifest = put_ollama(server, "library/tiny", "latest", BODY)
    blob = put_in_store(tmp_path / "ollama", "library/tiny", "latest", BODY, manifest)
    with pytest.raises(SourceError, match=r"belongs to Ollama; remove it by: ollama rm tiny:lat"):
        remove(find("ollama:tiny"))
    assert blob.exists()


def test_a_hub_s_model_is_removed_by_itself(hub, model_folder):
    resolve(f"hf:{REPO}:Q4_K_M")
    resolve(f"hf:{REPO}:Q8_0")
    resolve(f"hf:{REPO}:s")
    cache = Path(constants.HF_HUB_CACHE)
    assert remove(find(f"hf:{REPO}:Q8_0")) == 30
    assert set(listed()) == {f"hf:{REPO}:m-Q4_K_M.gguf", f"hf:{REPO}:s"}
    assert remove(find(f"hf:{REPO}:s")) == 0  # the parts are the same bytes as the other model
    assert resolve(f"hf:{REPO}", may_fetch=False).read_bytes() == BODY
    assert remove(find(f"hf:{REPO}")) == 15
    assert not (cache / "models--org--tiny-GGUF").exists()
    assert not (model_folder / "hf").exists()


def test_a_hub_s_model_is_removed_from_all_revisions(hub, store):
    first = resolve(f"hf:{REPO}:Q4_K_M")
    put_repo(hub, store, REPO, FILES | {"more.gguf": b"GGUF more"}, "f" * 40)
    resolve(f"hf:{REPO}@{'f' * 40}:Q4_K_M")
    resolve(f"hf:{REPO}@{'f' * 40}:more")
    assert remove(find(f"hf:{REPO}:Q4_K_M")) == 15
    assert not first.parent.exists()
    assert list(listed().values()) == [9]


def test_caches_behind_links(hub, server, model_folder):
    for cache in (Path(constants.HF_HUB_CACHE), model_folder):
        real = cache.with_name(f"{cache.name}-real")
        real.mkdir()
        cache.symlink_to(real)
    url = server.file("/m.gguf", BODY)
    for ref in (url, f"hf:{REPO}:m-Q8_0.gguf"):
        path = resolve(ref)
        assert list(listed()) == [ref]
        assert remove(find(ref)) >= 15
        assert cached_models() == []
        assert not path.exists()


def test_what_is_damaged_can_be_removed(hub, server, model_folder):
    url = server.file("/m.gguf", BODY)
    for ref in (url, f"hf:{REPO}:m-Q8_0.gguf"):
        path = resolve(ref)
        path.resolve().write_bytes(b"cut")
        with pytest.raises(SourceError, match=r"is not in the cache"):
            resolve(ref, may_fetch=False)
        assert listed() == {ref: 3}
        assert remove(find(ref)) >= 3
        assert cached_models() == []
        assert not path.exists()


def test_a_damaged_cache_of_the_hub_is_passed_over(hub, model_folder):
    resolve(f"hf:{REPO}")
    cache = Path(constants.HF_HUB_CACHE)
    (cache / "models--a--b").mkdir()
    (cache / "stray").write_text("x")
    assert set(listed()) == {f"hf:{REPO}:m-Q4_K_M.gguf"}


def test_what_an_interrupted_fetch_left(hub, store, model_folder):
    url = hub.file("/m-00002-of-00002.gguf", BODY)
    hub.file("/m-00001-of-00002.gguf", BODY)
    hub.faults["/m-00002-of-00002.gguf"] = [Fault(after=6), *[Fault(after=0)] * 3]
    store.faults[f"/blobs/{sha256(BODY)}"] = [Fault(after=7), *[Fault(after=0)] * 3]
    first = url.replace("00002-of", "00001-of")
    for ref in (url, f"hf:{REPO}:Q4_K_M"):
        with pytest.raises(SourceError, match=r"[67] of 15 bytes have come"):
            resolve(ref)
    assert listed() == {first: 21, f"hf:{REPO}:Q4_K_M": 7}
    assert {model.owner for model in cached_models()} == {"unfinished"}
    assert remove(find(first)) > 21
    assert remove(find(f"hf:{REPO}:Q4_K_M")) > 7
    assert cached_models() == []
    assert [name for name in everything_below(model_folder) if ".locks" not in name] == []
    with pytest.raises(SourceError, match=r"is not in the cache"):
        find(first)
