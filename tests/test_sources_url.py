"""Models by their URL."""

import httpx2
import pytest

from minfer_jax.sources import SourceError, resolve
from minfer_jax.sources import url as url_source
from minfer_jax.sources.record import read_record
from tests.helpers.servers import Fault

BODY = b"GGUF of a model"


def test_a_url_is_fetched_once(server, model_folder, capfd):
    url = server.file("/some/folder/m.gguf", BODY)
    path = resolve(url)
    port = url.rpartition(":")[2].partition("/")[0]
    assert path == model_folder / f"url/127.0.0.1_{port}/some/folder/m.gguf"
    assert path.read_bytes() == BODY
    assert capfd.readouterr().err.startswith("fetching m.gguf from 127.0.0.1 into ")
    server.close()
    assert resolve(url) == resolve(url, may_fetch=False) == resolve("m") == path
    assert resolve(url.replace("http", "HTTP")) == path


def test_login_and_query_are_sent_and_not_kept(server, model_folder, capfd):
    url = server.file("/m.gguf", BODY)
    path = resolve(url.replace("http://", "http://user:secret@") + "?token=hidden#here")
    assert server.requests[0].path == "/m.gguf?token=hidden"
    assert server.requests[0].headers["authorization"].startswith("Basic ")
    record = read_record(path)
    assert record is not None and record.source == url
    assert "secret" not in capfd.readouterr().err
    assert resolve(url) == path  # the same file, whoever asks

    server.faults["/n.gguf"] = [Fault(status=403)]
    with pytest.raises(SourceError, match=r"403") as caught:
        resolve(f"{server.url}/n.gguf?token=hidden")
    assert "hidden" not in str(caught.value)

    for wrong in (
        "https://u:hidden@h/a.bin",
        "HTTPS:u:hidden@h/a.gguf",
        "https://u:hidden@/a",
        "https://u:hidden@h/.x/a.gguf",
        "https://u:hidden@h:p/a.gguf?hidden",
    ):
        with pytest.raises(SourceError) as caught:
            resolve(wrong)
        assert "hidden" not in str(caught.value)


def test_all_parts_of_a_split_are_fetched(server, model_folder):
    names = [f"/m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    urls = [server.file(name, BODY + name.encode()) for name in names]
    server.faults[names[2]] = [Fault(status=404)]
    with pytest.raises(SourceError, match=r"404"):
        resolve(urls[1] + "?x=1")
    path = resolve(urls[1] + "?x=1")
    assert path.name == names[0][1:]
    assert server.asked() == [f"{name}?x=1" for name in (*names, names[2])]
    assert path.with_name(names[2][1:]).read_bytes() == BODY + names[2].encode()
    path.with_name(names[1][1:]).unlink()
    assert resolve(urls[0]) == path
    assert server.asked()[4:] == [names[1]]


def test_http_from_elsewhere_is_said_aloud(model_folder, monkeypatch, capfd):
    monkeypatch.setattr(url_source, "fetch", lambda *_: None)
    for url, said in (
        ("http://far/m.gguf", True),
        ("http://10.0.0.1/m.gguf", True),
        ("http://127.0.0.1/m.gguf", False),
        ("http://localhost/m.gguf", False),
        ("http://[::1]:80/m.gguf", False),
        ("https://far/m.gguf", False),
    ):
        resolve(url)
        assert ("is asked by http" in capfd.readouterr().err) == said


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("https:", r"'https:': it has no host"),
        ("https://", r"it has no host"),
        (
            "https://host",
            r"does not end in .gguf; the URL of a model is expected, such as https://",
        ),
        ("https://host/a.bin", r"does not end in .gguf"),
        ("https://host/.gguf", r"does not end in .gguf"),
        ("https://host/a.gguf/", r"does not end in .gguf"),
        ("https://host:port/a.gguf", r"'https://host:port/a.gguf': Invalid port"),
        ("https://host/../../a.gguf", r"in the cache"),  # as browsers take it: https://host/a.gguf
        ("https://host/%2e%2e/a.gguf", r"is not in the cache"),  # kept as it is written
        ("https://host/.locks/a.gguf", r"begins with a dot"),
        ("https://host/a\0.gguf", r"."),
        ("https://host/a\n.gguf", r"."),
        ("https://" + "x" * 9000, r"."),
        ("https://host/a.gguf", r"'https://host/a.gguf' is not in the cache"),
    ],
)
def test_what_is_no_url_of_a_model(model_folder, ref, message):
    with pytest.raises(SourceError, match=message) as caught:
        resolve(ref, may_fetch=False)
    assert "\n" not in str(caught.value)
    assert not model_folder.exists()


def test_no_two_urls_share_a_file(model_folder):
    urls = (
        "https://h/a.gguf", "http://h/a.gguf", "https://h:1/a.gguf", "https://h/A.gguf",
        "https://h/a*.gguf", "https://h/a_.gguf", "https://h/b/a.gguf", "https://h/a%2Fa.gguf",
        "https://m\u00fcller.de/a.gguf", "https://m\u00f6ller.de/a.gguf", "http://[::1]/a.gguf",
    )  # fmt: skip
    places = {url_source._place(httpx2.URL(url), model_folder) for url in urls}
    assert len(places) == len(urls)
    assert all(path.is_relative_to(model_folder / "url") for path in places)


def test_names_are_made_safe(server, model_folder):
    path = resolve(server.file("/a%20b/c%3A%C3%A9*.gguf", BODY))
    assert (
        path.relative_to(model_folder).parts[2:] == ("a%20b", "c%3A%C3%A9%2A.gguf")
        and path.exists()
    )
