"""What a client of HTTP is told, shows and refuses."""

import httpx2
import pytest

from minfer_jax.sources import http_client
from minfer_jax.sources.http_client import get_json
from minfer_jax.sources.transfer import SourceError, shown
from tests.helpers.servers import Fault


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1]", "/x holds a list, not an object"),
        (b"{", "holds no JSON"),
        (b"\xff", "holds no JSON"),
        (b"[" * 100_000, "holds no JSON"),
        (b" " * (5 << 20), "is longer than"),
    ],
)
def test_no_json(server, model_folder, body, message):
    with pytest.raises(SourceError, match=message):
        get_json(server.file("/x", body), {})


def test_json(server, model_folder):
    url = server.file("/x", b'{"a": 1}')
    server.faults["/x"] = [Fault(after=3), Fault(status=503)]
    assert get_json(url, {"Accept": "b"}) == {"a": 1}
    assert [one.headers["accept"] for one in server.requests] == ["b"] * 3


def test_https_is_not_left_for_http():
    asked = httpx2.Request("GET", "http://host/a.gguf")
    response = httpx2.Response(200, request=asked)
    with pytest.raises(SourceError, match=r"host redirects from https to http; not followed"):
        http_client.check_answer(response, "https://host/a.gguf")


SECRET = "user:secret@"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SSL_CERT_FILE", "/nowhere", r"no connections can be made \(.*No such file"),
        (
            "HTTPS_PROXY",
            "socks5://127.0.0.1:9",
            r"no connections can be made \(.*socks.*HTTPS_",
        ),
        ("HTTPS_PROXY", f"ftp://{SECRET}h", r"no connections can be made \(Unknown scheme"),
    ],
)
def test_surroundings_without_connections(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SourceError, match=message) as caught:
        get_json("https://127.0.0.1:9/a", {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"https://{SECRET}127.0.0.1:99999999/a.gguf", r"cannot fetch https://127.0.0.1:99999999/"),
        (f"https://{SECRET}{'x' * 80}.invalid/a.gguf", r"cannot fetch https://xxx"),
    ],
)
def test_hosts_and_ports_that_are_none(model_folder, url, message):
    with pytest.raises(SourceError, match=message) as caught:
        get_json(url, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://u:p@h:1/a@b.gguf?x=1#y", "https://h:1/a@b.gguf"),
        ("HTTPS:u:p@h", "HTTPS:h"),
        ("http://u:p@q@h", "http://h"),
        ("https://h/a.gguf?x\ny=@", "https://h/a.gguf"),
        ("hf:a/b@main:x?", "hf:a/b@main:x?"),
        ("./https://a@b", "./https://a@b"),
    ],
)
def test_what_is_shown_of_a_url(text, expected):
    assert shown(text) == expected
