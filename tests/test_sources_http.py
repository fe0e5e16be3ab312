"""Downloads, from a server that drops, lies, redirects, refuses and dawdles."""

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer_jax.sources import http_client, http_fetch, transfer
from minfer_jax.sources.http_client import HttpError
from minfer_jax.sources.http_fetch import Remote, fetch
from minfer_jax.sources.record import Record, read_record
from minfer_jax.sources.transfer import SourceError
from tests.helpers.servers import Fault, Page, Server, sha256

BODY = b"GGUF" + bytes(range(251)) * 40
OTHER = b"GGUF" + bytes(range(250, -1, -1)) * 40  # as long


@pytest.fixture
def url(server) -> str:
    return server.file("/a.gguf", BODY, ETag='"one"')


@pytest.fixture
def get(model_folder):
    """Fetches a URL to FOLDER/a.gguf."""

    def run(url: str, **known) -> Path:
        return fetch(Remote(url=url, source="ref", **known), model_folder / "a.gguf", model_folder)

    return run


def part_of(folder: Path, body: bytes, note: str | None = '{"etag": "\\"one\\"", "size": 10044}'):
    folder.mkdir(exist_ok=True)
    (folder / "a.gguf.part").write_bytes(body)
    if note is not None:
        (folder / "a.gguf.part.json").write_text(note)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


def test_a_file_is_fetched_once(get, url, server, model_folder, capfd):
    path = get(url)
    assert path.read_bytes() == BODY and len(BODY) == 10_044
    assert files_in(model_folder) == ["a.gguf", "a.gguf.json"]
    assert read_record(path) == Record(size=len(BODY), sha256=sha256(BODY), source="ref")
    assert capfd.readouterr() == (
        "",
        f"fetching a.gguf from 127.0.0.1 into {model_folder}\n",
    )
    assert get(url) == path
    assert server.asked() == ["/a.gguf"]
    assert server.requests[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("damage", ["shorter", "no record", "bad record"])
def test_a_file_that_does_not_agree_with_its_record_is_fetched_anew(get, url, server, damage):
    path = get(url)
    if damage == "shorter":
        path.write_bytes(BODY[:-1])
    elif damage == "no record":
        path.with_name("a.gguf.json").unlink()
    else:
        path.with_name("a.gguf.json").write_text('{"size": true, "sha256": "", "source": ""}')
    assert get(url).read_bytes() == BODY
    assert len(server.requests) == 2


# --- what breaks off ------------------------------------------------------------------------------


@pytest.mark.parametrize("etag", ['"one"', 'W/"one"', None])
def test_it_goes_on_where_it_broke_off(get, url, server, etag, capfd):
    headers = {} if etag is None else {"ETag": etag}
    server.pages["/a.gguf"] = Page(body=BODY, headers=headers)
    server.faults["/a.gguf"] = [Fault(after=4000), Fault(after=100), Fault(after=0)]
    assert get(url).read_bytes() == BODY
    assert server.ranges() == [None, "bytes=4000-", "bytes=4100-", "bytes=4100-"]
    # A weak tag may not be used so (RFC 9110, 13.1.5)
    strong = '"one"' if etag == '"one"' else None
    assert [one.headers.get("if-range") for one in server.requests[1:]] == [strong] * 3
    assert capfd.readouterr().err.count("trying again") == 3


def test_the_tries_are_bounded_and_the_error_says_how_far_it_came(get, url, server, model_folder):
    server.faults["/a.gguf"] = [Fault(after=1000)] * 9
    with pytest.raises(SourceError, match=r"/a.gguf: .*; 4000 of 10044 bytes have come, and the"):
        get(url)
    assert len(server.requests) == 4
    assert files_in(model_folder) == ["a.gguf.part", "a.gguf.part.json"]
    server.faults.clear()
    assert get(url).read_bytes() == BODY  # another run goes on
    assert server.ranges()[-1] == "bytes=4000-"
    assert files_in(model_folder) == ["a.gguf", "a.gguf.json"]


def test_tries_that_bring_much_do_not_count(get, server, monkeypatch):
    monkeypatch.setattr(http_fetch, "_STEP", 1000)
    server.faults["/a.gguf"] = [Fault(after=1000)] * 9
    assert get(server.file("/a.gguf", BODY)).read_bytes() == BODY
    assert len(server.requests) == 10


def test_a_server_without_ranges_starts_over(get, url, server, model_folder):
    part_of(model_folder, BODY[:5000])
    server.faults["/a.gguf"] = [Fault(ranges=False)]
    assert get(url).read_bytes() == BODY
    assert server.ranges() == ["bytes=5000-"]


@pytest.mark.parametrize(
    ("note", "asked"),
    [
        ('{"etag": "\\"one\\"", "size": 10044}', ["bytes=5000-"]),  # another ETag now: sent whole
        ('{"etag": null, "size": 999}', ["bytes=5000-", None]),  # it was of another length
        ("no JSON", [None]),
        (None, [None]),
    ],
)
def test_the_rest_of_another_file_is_not_appended(get, server, model_folder, note, asked):
    url = server.file("/a.gguf", OTHER, ETag='"two"')
    part_of(model_folder, BODY[:5000], note)
    assert get(url).read_bytes() == OTHER
    assert server.ranges() == asked


def test_a_part_of_another_file_is_found_out_by_the_digest(get, url, server, model_folder):
    part_of(model_folder, OTHER[:5000])
    path = get(url, size=len(BODY), sha256=sha256(BODY))
    assert path.read_bytes() == BODY
    assert server.ranges() == ["bytes=5000-", None]


def test_a_part_that_is_whole_already(get, url, server, model_folder):
    part_of(model_folder, BODY)
    assert get(url).read_bytes() == BODY
    assert server.requests == []
    (model_folder / "a.gguf").unlink()
    part_of(model_folder, BODY + b"more")  # 416: it is longer than the file
    assert get(url).read_bytes() == BODY
    assert server.ranges() == ["bytes=10048-", None]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    start=st.integers(0, len(BODY)),
    drops=st.lists(st.tuples(st.integers(0, len(BODY)), st.booleans()), max_size=3),
)
def test_wherever_it_breaks_off_the_file_is_right(server, model_folder, start, drops):
    server.file("/a.gguf", BODY, ETag='"one"')
    server.faults["/a.gguf"] = [Fault(after=n, ranges=ranges) for n, ranges in drops]
    path = model_folder / "a.gguf"
    path.unlink(missing_ok=True)
    part_of(model_folder, BODY[:start])
    fetch(Remote(url=server.url + "/a.gguf", source="ref"), path, model_folder)
    assert path.read_bytes() == BODY


# --- answers that bring no file -------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_refusals_are_not_repeated(get, url, server, status, model_folder):
    server.faults["/a.gguf"] = [Fault(status=status)]
    with pytest.raises(HttpError, match=rf"127.0.0.1 answers {status} .* for http.*/a.gguf") as e:
        get(url)
    assert e.value.status == status and len(server.requests) == 1
    assert not (model_folder / "a.gguf").exists()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(get, url, server, status, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(http_client.time, "sleep", slept.append)
    server.faults["/a.gguf"] = [
        Fault(status=status),
        Fault(status=status, headers={"Retry-After": "7"}),
        Fault(status=status, headers={"Retry-After": "86400"}),
    ]
    assert get(url).read_bytes() == BODY
    assert [seconds for seconds in slept if seconds] == [7, 60]


def test_a_server_that_stays_busy(get, url, server):
    server.faults["/a.gguf"] = [Fault(status=503)] * 9
    with pytest.raises(
        SourceError, match=r"the server answers 503 Service Unavailable; nothing has come"
    ):
        get(url)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("length", "message"),
    [
        ("20000", r"10044 of 20000 bytes have come"),
        ("", r"127.0.0.1 does not say how long the file is"),
        ("-5", r"."),
    ],
)
def test_wrong_lengths(get, url, server, length, message, model_folder):
    server.faults["/a.gguf"] = [Fault(length=length, ranges=False)] * 9
    with pytest.raises(SourceError, match=message):
        get(url)
    assert not (model_folder / "a.gguf").exists()


def test_another_length_than_is_known(get, url, server, model_folder):
    with pytest.raises(SourceError, match=r"the server has 10044 bytes of it; 10000 are expected"):
        get(url, size=10_000)
    assert len(server.requests) == 4
    assert not (model_folder / "a.gguf").exists()


def test_another_digest_than_is_known(get, url, server, model_folder):
    with pytest.raises(SourceError, match=rf"sha256 {sha256(BODY)}; {sha256(OTHER)} is expected"):
        get(url, sha256=sha256(OTHER))
    assert len(server.requests) == 1
    assert files_in(model_folder) == []


@pytest.mark.parametrize("header", ["X-Linked-Etag", "ETag"])
def test_a_hub_s_digest_is_checked(get, server, header):
    headers = {header: f'"{sha256(OTHER)}"', "X-Repo-Commit": "1"}
    server.pages["/a.gguf"] = Page(body=BODY, headers=headers)
    with pytest.raises(SourceError, match=r"is expected. It is not kept"):
        get(server.url + "/a.gguf")


def test_another_server_s_tag_is_no_digest(get, server):
    assert get(server.file("/a.gguf", BODY, ETag=f'"{sha256(OTHER)}"')).read_bytes() == BODY


def test_what_is_no_model(get, server, model_folder):
    with pytest.raises(SourceError, match=r"/a.gguf is no GGUF file: it begins with b'<htm'"):
        get(server.file("/a.gguf", b"<html>log in"))
    with pytest.raises(SourceError, match=r"is no GGUF file: it begins with b''"):
        get(server.file("/a.gguf", b""))
    assert not (model_folder / "a.gguf").exists()


def test_redirects(get, server):
    with closing(Server()) as other:
        url = other.file("/far.gguf", BODY)
        server.pages["/a.gguf"] = Page(status=307, headers={"Location": "/b.gguf"})
        server.pages["/b.gguf"] = Page(status=302, headers={"Location": url})
        other.faults["/far.gguf"] = [Fault(after=100)]
        headers = {"Authorization": "Bearer secret"}
        assert get(server.url + "/a.gguf", headers=headers).read_bytes() == BODY
        # The login is for the host that was asked
        assert [one.headers.get("authorization") for one in server.requests] == [
            "Bearer secret"
        ] * 4
        assert [one.headers.get("authorization") for one in other.requests] == [None, None]
        assert other.ranges() == [None, "bytes=100-"]


def test_redirects_without_end(get, server):
    server.pages["/a.gguf"] = Page(status=302, headers={"Location": "/a.gguf"})
    with pytest.raises(SourceError, match=r"cannot fetch http.*/a.gguf: Exceeded maximum allowed"):
        get(server.url + "/a.gguf")


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/a.gguf", "file:///etc/passwd"])
def test_redirects_to_something_else(get, server, location):
    server.pages["/a.gguf"] = Page(status=302, headers={"Location": location})
    with pytest.raises(SourceError, match=r"cannot fetch"):
        get(server.url + "/a.gguf")
    assert len(server.requests) == 1


def test_a_server_that_does_not_answer(get, url, server, monkeypatch):
    monkeypatch.setattr(http_client, "TIMEOUT", 0.3)
    server.faults["/a.gguf"] = [Fault(pause=2.0)] * 2
    assert get(url).read_bytes() == BODY
    assert len(server.requests) == 3


def test_no_server(get, server, monkeypatch):
    monkeypatch.setattr(http_client, "PAUSES", (0.0, 0.1, 0.1))
    server.close()
    with pytest.raises(SourceError, match=r"are you online, and is a proxy needed"):
        get(server.url + "/a.gguf")


def test_nobody_reads_what_is_said(get, url, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stderr.write", gone)
    assert get(url).read_bytes() == BODY


# --- the disk, and other processes ----------------------------------------------------------------


def test_disk_full(get, url, server, model_folder, monkeypatch):
    replacing = http_fetch.os.fsync

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(http_fetch.os, "fsync", full)
    with pytest.raises(SourceError, match=r"^cannot keep a.gguf in .*: No space left .*MINFER_MO"):
        get(url)
    assert not (model_folder / "a.gguf").exists()
    monkeypatch.setattr(http_fetch.os, "fsync", replacing)
    assert get(url).read_bytes() == BODY


def test_a_write_that_fails_in_the_middle_keeps_what_came(url, get, server, model_folder):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    big = BODY * 100
    server.file("/a.gguf", big, ETag='"one"')
    with start(url, model_folder, limit) as process:
        error = process.communicate(timeout=60)[1].splitlines()[-1]
    message = r".*SourceError: cannot keep a.gguf in .*: File too large; set .*"
    assert re.fullmatch(message, error)
    assert not (model_folder / "a.gguf").exists()
    came = (model_folder / "a.gguf.part").stat().st_size
    assert 0 < came <= 100_000
    assert get(url).read_bytes() == big
    assert server.ranges() == [None, f"bytes={came}-"]


def test_disk_too_small(get, url, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(SourceError, match=r"0 MB are needed and 0 MB are free; make room"):
        get(url)


def test_a_folder_that_cannot_be_made(url, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / "below"
    with pytest.raises(SourceError, match=r"cannot keep a.gguf in .*Not a directory; set MINFER"):
        fetch(Remote(url=url, source="ref"), folder / "a.gguf", folder)


FETCH = """
import sys
from pathlib import Path
from minfer_jax.sources.http_fetch import Remote, fetch
folder = Path(sys.argv[2])
fetch(Remote(url=sys.argv[1], source="ref"), folder / "a.gguf", folder)
"""


def start(url: str, folder: Path, before: str = "") -> subprocess.Popen:
    # Where the tests run in the background, SIGINT is ignored unless asked for.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}\n{before}\n{FETCH}", url, str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_leaves_what_came_for_the_next(url, get, server, model_folder, how):
    big = BODY * 100
    server.file("/a.gguf", big, ETag='"one"')
    server.faults["/a.gguf"] = [Fault(pause=1.0)]  # before each quarter
    part = model_folder / "a.gguf.part"
    with start(url, model_folder) as process:
        wait_for(lambda: part.exists() and part.stat().st_size > 100_000)
        process.send_signal(how)
        process.wait(30)
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode
    assert ("1004400 bytes have come" in said) == (how == signal.SIGINT)
    assert not (model_folder / "a.gguf").exists()
    came = part.stat().st_size
    assert get(url).read_bytes() == big
    assert server.ranges() == [None, f"bytes={came}-"]


def test_an_end_before_the_last_step_loses_nothing(get, url, server, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(http_fetch, "write_record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get(url)
    assert get(url).read_bytes() == BODY
    assert len(server.requests) == 1


def test_two_processes_at_once(url, server, model_folder):
    waited = threading.Event()
    server.faults["/a.gguf"] = [Fault(until=waited)]
    with start(url, model_folder) as one:
        wait_for(lambda: server.requests)
        with start(url, model_folder) as two:
            assert two.stderr
            assert two.stderr.readline() == "another process fetches a.gguf; waiting for it\n"
            waited.set()
    assert one.returncode == two.returncode == 0
    assert (model_folder / "a.gguf").read_bytes() == BODY
    assert server.asked() == ["/a.gguf"]


def test_threads_at_once(url, get, server, model_folder):
    threads = [threading.Thread(target=get, args=(url,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked() == ["/a.gguf"]
    assert files_in(model_folder) == ["a.gguf", "a.gguf.json"]


def test_names_of_others_do_not_steer_the_terminal(capfd):
    transfer.say("fetching \x1b[2Jm.gguf\r\n")
    assert capfd.readouterr().err == "fetching \\x1b[2Jm.gguf\\r\\n\n"


def test_a_bar_on_a_terminal(url, get, server, monkeypatch, capfd):
    monkeypatch.setattr(transfer, "on_terminal", lambda: True)
    server.faults["/a.gguf"] = [Fault(pause=0.05)]
    get(url)
    assert re.search(r"\ra.gguf: +\d+%.*k/10.0k", capfd.readouterr().err)
