"""Models of a Hugging Face hub: which file is meant, and how it is fetched."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from minfer_jax.sources import SourceError, http_client, resolve
from minfer_jax.sources.hub_cache import digest_of
from minfer_jax.sources.hub_choice import choose, parse
from minfer_jax.sources.record import Record, read_record
from minfer_jax.sources.split import all_parts
from tests.helpers.servers import COMMIT, Fault, put_repo, sha256

REPO = "org/tiny-GGUF"
BODY = b"GGUF of a model" * 1000
SPLIT = all_parts("big/m-Q8_0-00001-of-00003.gguf")
FILES = {
    "README.md": b"hello",
    "m-Q4_K_M.gguf": BODY,
    "m-Q4_K_S.gguf": b"GGUF small",
    "m.F16.gguf": b"GGUF half",
    "mmproj-m-Q8_0.gguf": b"GGUF eyes",
    **{name: b"GGUF" + name.encode() for name in SPLIT},
}


@pytest.fixture
def hub(hub, store):
    """A hub with one repository."""
    put_repo(hub, store, REPO, FILES)
    return hub


# --- which file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("", "m-Q4_K_M.gguf"),
        (":Q4_K_M", "m-Q4_K_M.gguf"),
        (":q4_k_s", "m-Q4_K_S.gguf"),
        (":F16", "m.F16.gguf"),
        (":m.F16.gguf", "m.F16.gguf"),
        (":M.f16", "m.F16.gguf"),
        (":Q8_0", SPLIT[0]),
        (f":{SPLIT[1]}", SPLIT[0]),
        (":big/m-Q8_0", SPLIT[0]),
        (":m-q8_0", SPLIT[0]),
    ],
)
def test_choice(wanted, found):
    assert choose(parse(f"hf:{REPO}{wanted}"), FILES)[0] == found


@pytest.mark.parametrize(
    ("wanted", "names", "message"),
    [
        (":Q2_K", FILES, r"holds no 'Q2_K'; it holds big/m-Q8_0, m-Q4_K_M, .*; name one of them"),
        (":K_M", FILES, r"holds no 'K_M'"),  # the part of a quantisation's name
        (":mmproj-m-Q8_0.gguf", FILES, r"holds no 'mmproj"),
        (":Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], r"'q8_0' may be any of a-Q8_0, b-Q8_0 in org/"),
        ("", ["a-Q8_0.gguf", "a-Q2_K.gguf"], r"holds several models: a-Q2_K, a-Q8_0; name one"),
        ("", ["model.safetensors", "mmproj.gguf", "x.imatrix.gguf"], r"holds no whole model as"),
        ("", SPLIT[:2], r"holds no whole model"),
    ],
)
def test_no_choice(wanted, names, message):
    with pytest.raises(SourceError, match=message):
        choose(parse(f"hf:{REPO}{wanted}"), names)


def test_the_only_model():
    assert choose(parse(f"hf:{REPO}"), ["x.gguf", "mmproj-x.gguf"]) == ("x.gguf",)


@pytest.mark.parametrize(
    ("ref", "repo", "revision", "wanted"),
    [
        ("hf:gpt2", "gpt2", None, None),
        ("hf:a/b.c:d/e.gguf", "a/b.c", None, "d/e.gguf"),
        ("hf:a/b@v1.0:Q8_0", "a/b", "v1.0", "Q8_0"),
        ("hf:a/b@refs/pr/1", "a/b", "refs/pr/1", None),
    ],
)
def test_references(ref, repo, revision, wanted):
    model = parse(ref)
    assert (model.repo, model.revision, model.wanted) == (repo, revision, wanted)


@pytest.mark.parametrize(
    "ref", ["hf:", "hf:a/b/c", "hf:/a", "hf:a/..", "hf:a..b/c", "hf:a/b@", "hf:a/b@../x", "hf:a/b:",
            "hf:a b/c", "hf:a/b:\0", "hf:-a/b"],
)  # fmt: skip
def test_what_is_no_reference(ref):
    with pytest.raises(SourceError, match=r"is no model of a hub; hf:ORG/REPO, hf:ORG/REPO:QUANT"):
        parse(ref)


# --- fetching -------------------------------------------------------------------------------------


def test_a_model_is_fetched_once_into_the_hub_s_cache(hub, store, model_folder, capfd):
    path = resolve(f"hf:{REPO}")
    cache = Path(constants.HF_HUB_CACHE, "models--org--tiny-GGUF")
    assert path == cache / "snapshots" / COMMIT / "m-Q4_K_M.gguf"
    assert path.read_bytes() == BODY
    assert path.resolve() == (cache / "blobs" / sha256(BODY)).resolve()
    assert (cache / "refs/main").read_text() == COMMIT
    names = sorted(p.name for p in (cache / "blobs").iterdir())
    assert names == [sha256(BODY), f"{sha256(BODY)}.json"]
    record = read_record(cache / "blobs" / sha256(BODY))
    assert record == Record(size=len(BODY), sha256=sha256(BODY), source=f"hf:{REPO}")
    assert not model_folder.exists()
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"fetching m-Q4_K_M.gguf (0 MB) from {hub.url} into {cache}\n")
    hub.close()
    store.close()
    asked = len(hub.requests), len(store.requests)
    for ref in (f"hf:{REPO}", f"hf:{REPO}:Q4_K_M", f"hf:{REPO}@{COMMIT}:m-Q4_K_M.gguf"):
        assert resolve(ref) == resolve(ref, may_fetch=False) == path
    assert asked == (len(hub.requests), len(store.requests))


def test_all_parts_of_a_split_are_fetched(hub):
    path = resolve(f"hf:{REPO}:Q8_0")
    assert path.name == "m-Q8_0-00001-of-00003.gguf"
    for name in SPLIT:
        assert path.with_name(Path(name).name).read_bytes() == FILES[name]
    os.unlink(path.with_name(Path(SPLIT[2]).name))
    with pytest.raises(SourceError, match=r"not in the cache|no whole model"):
        resolve(f"hf:{REPO}:Q8_0", may_fetch=False)
    assert resolve(f"hf:{REPO}:Q8_0") == path
    assert path.with_name(Path(SPLIT[2]).name).exists()


def test_a_download_goes_on_where_another_run_broke_off(hub, store):
    place = f"/blobs/{sha256(BODY)}"
    store.faults[place] = [Fault(after=9000), *[Fault(after=0)] * 3]
    with pytest.raises(SourceError, match=r"9000 of 15000 bytes have come"):
        resolve(f"hf:{REPO}")
    assert resolve(f"hf:{REPO}").read_bytes() == BODY
    assert store.ranges() == [None] + ["bytes=9000-"] * 4


def test_the_digest_is_checked(hub, store):
    store.file(f"/blobs/{sha256(BODY)}", BODY[:-1] + b"?")
    with pytest.raises(SourceError, match=rf"m-Q4_K_M.gguf|{sha256(BODY)} is expected"):
        resolve(f"hf:{REPO}")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.gguf"))


def test_a_blob_that_was_cut_is_fetched_anew(hub, store):
    path = resolve(f"hf:{REPO}")
    path.resolve().write_bytes(BODY[:-1])
    with pytest.raises(SourceError, match=r"not in the cache"):
        resolve(f"hf:{REPO}", may_fetch=False)
    assert resolve(f"hf:{REPO}").read_bytes() == BODY
    assert len(store.requests) == 2


def test_what_is_here_serves_while_the_repository_moves_on(hub, store):
    path = resolve(f"hf:{REPO}:Q4_K_M")
    put_repo(hub, store, REPO, FILES | {"m-Q4_K_M.gguf": b"GGUF better"}, "f" * 40)
    other = resolve(f"hf:{REPO}:Q4_K_S")
    assert other.parent != path.parent  # main is the new commit now
    hub.close()
    assert resolve(f"hf:{REPO}:Q4_K_M") == path


def test_a_revision(hub, store):
    put_repo(hub, store, REPO, {"m-Q4_K_M.gguf": b"GGUF better"}, "f" * 40)
    assert resolve(f"hf:{REPO}").read_bytes() == b"GGUF better"
    assert resolve(f"hf:{REPO}@{COMMIT}").read_bytes() == BODY
    with pytest.raises(SourceError, match=r"no repository or file org/tiny-GGUF at http://"):
        resolve(f"hf:{REPO}@nowhere")


def test_the_only_model_that_is_here_is_taken_without_a_name(hub):
    path = resolve(f"hf:{REPO}:F16")
    hub.close()
    assert resolve(f"hf:{REPO}") == path


def test_a_blob_in_a_store_that_caches_share(hub, store):
    path = resolve(f"hf:{REPO}:m.F16")
    blob = path.resolve()
    shared = Path(constants.HF_HUB_CACHE, "shared", "0" * 64)
    shared.parent.mkdir()
    blob.rename(shared)
    blob.symlink_to(shared)
    assert digest_of(path) == sha256(FILES["m.F16.gguf"])  # by its first name
    assert resolve(f"hf:{REPO}:m.F16", may_fetch=False) == path
    shared.write_bytes(b"cut")
    assert resolve(f"hf:{REPO}:m.F16").read_bytes() == FILES["m.F16.gguf"]


def test_several_at_once(hub, store):
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(resolve(f"hf:{REPO}"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and len(paths) == 3
    assert len(store.requests) == 1


def test_a_file_of_unknown_length_is_left_to_huggingface_hub(hub, store):
    headers = hub.pages[f"/{REPO}/resolve/main/m-Q4_K_M.gguf"].headers
    assert isinstance(headers, dict)
    del headers["X-Linked-Size"]
    assert resolve(f"hf:{REPO}").read_bytes() == BODY


def test_a_file_without_a_tag(hub):
    headers = hub.pages[f"/{REPO}/resolve/main/m-Q4_K_M.gguf"].headers
    assert isinstance(headers, dict)
    del headers["X-Linked-Etag"], headers["ETag"]
    with pytest.raises(SourceError, match=r"for org/tiny-GGUF: .* does not have an ETag"):
        resolve(f"hf:{REPO}")


# --- refusals -------------------------------------------------------------------------------------

API = f"/api/models/{REPO}/revision/main"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=404), r"no repository or file org/tiny-GGUF at http://.*; check the name"),
        (Fault(status=401), r"is not at http://.* \(401\), or is private; .* set HF_TOKEN"),
        (Fault(status=403), r"\(403\), or is private"),
        (Fault(status=403, headers={"X-Error-Code": "GatedRepo"}), r"is gated: accept its terms"),
        (Fault(status=404, headers={"X-Error-Code": "RevisionNotFound"}), r"no revision 'main'"),
        (Fault(status=400), r"answers 400 for org/tiny-GGUF; try again later"),
    ],
)
@pytest.mark.parametrize("path", [API, f"/{REPO}/resolve/main/m-Q4_K_M.gguf"])
def test_refusals(hub, path, fault, message):
    hub.faults[path] = [fault] * 2
    with pytest.raises(SourceError, match=message) as caught:
        resolve(f"hf:{REPO}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [API, f"/{REPO}/resolve/main/m-Q4_K_M.gguf"])
def test_a_busy_hub_is_asked_again(hub, path):
    hub.faults[path] = [Fault(status=503), Fault(status=429)]
    assert resolve(f"hf:{REPO}").read_bytes() == BODY


def test_a_hub_that_stays_busy(hub):
    hub.faults[API] = [Fault(status=503)] * 9
    with pytest.raises(SourceError, match=r"answers 503 for org/tiny-GGUF; try again later"):
        resolve(f"hf:{REPO}")
    assert len(hub.requests) == 4


def test_a_hub_that_does_not_answer(hub, monkeypatch):
    monkeypatch.setattr(http_client, "TIMEOUT", 0.1)
    hub.faults[API] = [Fault(pause=1.0)] * 9
    with pytest.raises(SourceError, match=r"cannot reach http://.* for org/tiny-GGUF: timed out"):
        resolve(f"hf:{REPO}")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"id": "x", "siblings": [1]}', b"1"])
def test_what_a_hub_does_not_say(hub, body):
    hub.file(API, body)
    with pytest.raises(SourceError, match=r"cannot be used|holds no whole model"):
        resolve(f"hf:{REPO}")


def test_names_that_lead_elsewhere(hub, store):
    names = ("../../../m-Q4_K_M.gguf", "/m-Q4_K_M.gguf", "a//m-Q4_K_M.gguf", "./m-Q4_K_M.gguf")
    put_repo(hub, store, REPO, dict.fromkeys(names, BODY))
    with pytest.raises(SourceError, match=r"holds no whole model"):
        resolve(f"hf:{REPO}")


def test_no_hub(hub):
    hub.close()
    with pytest.raises(SourceError, match=r"cannot reach .*; are you online, and is a proxy"):
        resolve(f"hf:{REPO}")


def test_surroundings_without_connections(hub, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"no connections can be made \(.*socks"):
        resolve(f"hf:{REPO}")


def test_a_login_of_the_hub_is_not_shown(hub, monkeypatch):
    endpoint = hub.url.replace("//", "//user:secret@")
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub.faults[API] = [Fault(status=status) for status in (400, 401, 404)]
    hub.faults[f"/{REPO}/resolve/main/m-Q4_K_M.gguf"] = [Fault(status=404), Fault(status=410)]
    for _ in range(5):
        with pytest.raises(SourceError) as caught:
            resolve(f"hf:{REPO}")
        assert "secret" not in str(caught.value)
    hub.close()
    with pytest.raises(SourceError, match=r"cannot (reach|fetch) http://127") as caught:
        resolve(f"hf:{REPO}")
    assert "secret" not in str(caught.value)


def test_no_network_wanted(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"not in the cache, and HF_HUB_OFFLINE forbids"):
        resolve(f"hf:{REPO}")
    assert hub.requests == []


def test_an_odd_tag_names_no_file(hub, store):
    page = hub.pages[f"/{REPO}/resolve/main/m-Q4_K_M.gguf"]
    assert isinstance(page.headers, dict)
    page.headers["X-Linked-Etag"] = '"../../x"'
    with pytest.raises(SourceError, match=r"has an odd ETag"):
        resolve(f"hf:{REPO}")


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    (tmp_path / "hub").write_bytes(b"")
    with pytest.raises(SourceError, match=r"cannot keep m-Q4_K_M.gguf in .*set HF_HUB_CACHE to"):
        resolve(f"hf:{REPO}")


def test_disk_full(hub, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SourceError, match=r"cannot keep m-Q4_K_M.gguf in .*No space left"):
        resolve(f"hf:{REPO}")


# --- the environment, in a process of its own -----------------------------------------------------


def test_the_hub_s_variables_are_heeded(server, store, tmp_path):
    put_repo(server, store, REPO, FILES)
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": "hf_secret",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    code = (
        "import sys; from minfer_jax.sources import resolve; "
        "print(*map(resolve, sys.argv[1:]), sep='\\n')"
    )
    command = [sys.executable, "-c", code, f"hf:{REPO}", f"hf:{REPO}:F16"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    names = [Path(line).name for line in run.stdout.splitlines()]
    assert names == ["m-Q4_K_M.gguf", "m.F16.gguf"]
    assert all(Path(line).is_relative_to(tmp_path / "hf/hub") for line in run.stdout.splitlines())
    assert {one.headers.get("authorization") for one in server.requests} == {"Bearer hf_secret"}
    assert {one.headers.get("authorization") for one in store.requests} == {None}
    assert not any("agent-harnesses" in path for path in server.asked())

    shutil.rmtree(tmp_path / ".cache", ignore_errors=True)
    asked = len(server.requests)
    env |= {"HF_HUB_OFFLINE": "1"}
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stdout, again.stderr) == (0, run.stdout, "")
    command[-1] = f"hf:{REPO}:Q8_0"
    none = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert none.returncode == 1
    last = none.stderr.splitlines()[-1]
    assert f"SourceError: {REPO} is not in the cache, and HF_HUB_OFFLINE forbids" in last
    assert asked == len(server.requests)
