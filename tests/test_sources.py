"""Model references: what they look like, and what they stand for on this machine."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer_jax.sources import ALIASES, DEFAULT_MODEL, SourceError, model_dir, resolve
from minfer_jax.sources.record import Record, write_record
from minfer_jax.sources.wheel import WheelFile


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases(model_folder, alias, monkeypatch):
    asked: list[tuple[WheelFile, Path, str]] = []
    monkeypatch.setattr(
        "minfer_jax.sources.references.fetch", lambda *wanted: asked.append(wanted) or Path("got")
    )
    assert resolve(alias) == Path("got")
    assert asked == [(ALIASES[alias], model_folder, alias)]
    row = ALIASES[alias]
    assert row.size and re.fullmatch("[0-9a-f]{64}", row.sha256 or "")
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", part.requirement) for part in row.parts)
    assert row.file_name.endswith(".gguf")
    # The same file named by its wheel is the alias's file, with its digest
    if len(row.parts) == 1:
        resolve(f"pypi:{row.parts[0].requirement}/{row.parts[0].member}")
        assert asked[1][:2] == asked[0][:2]


def test_default_model_is_an_alias():
    assert DEFAULT_MODEL == "smollm2" and DEFAULT_MODEL in ALIASES


def test_paths(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    touch(tmp_path, "a.gguf", "sub/b.gguf", "sub/noending", "smollm2", "home/c.gguf")
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert resolve(tmp_path / "sub/noending") == tmp_path / "sub/noending"
    for ref in ("a.gguf", "./a.gguf", "sub/b.gguf", "sub/noending", "sub/../a.gguf", "./smollm2"):
        assert resolve(ref).samefile(tmp_path / ref)
    assert resolve("~/c.gguf") == tmp_path / "home/c.gguf"
    assert resolve(Path("smollm2")).samefile(tmp_path / "smollm2")  # a Path is a path if it exists


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("./none.gguf", r"no such file: 'none.gguf'"),
        ("/nowhere/none", r"no such file: '/nowhere/none'"),
        ("/nowhere/a\0b", r"no such file: '/nowhere/a\\x00b'"),
        ("/" + "x" * 9000, r"no such file: '/x{199}\.\.\.'"),
        (".", r"'.' is a folder"),
        ("~no.such.user/x.gguf", r"home folder is not known; set HOME"),
        ("", r"the model reference is empty; a path to a .gguf file, an alias"),
        (" \n", r"the model reference is empty"),
        ("none", r"no model 'none': a reference is .*alias \(smollm2, gemma3\), .*holds nothing"),
        ("smolm2", r"no model 'smolm2' \(did you mean 'smollm2'\?\): a reference"),
        ("none\nx", r"no model 'none\\nx'"),
        (
            "hf:a b",
            r"'hf:a b' is no model of a hub; hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO:",
        ),
        (
            "ollama:",
            r"'ollama:' is no Ollama model; ollama:NAME:TAG or ollama:USER/NAME:TAG is exp",
        ),
        ("https:x", r"'https:x': it has no host, or does not end in .gguf; the URL of a model"),
        ("HF:a b", r"'hf:a b' is no model of a hub"),
        ("Ollama:../../x", r"'ollama:../../x' is no Ollama model"),
        ("PyPI:", r"'pypi:' is no package reference"),
        ("pypi:", r"'pypi:' is no package reference; pypi:NAME==VERSION/MEMBER is expected"),
        ("pypi:name==1.0", r"is no package reference"),
        ("pypi:name>=1.0/x", r"is no package reference"),
        ("pypi:--index-url=http/x", r"is no package reference"),
        ("pypi:name @ https://host/x", r"is no package reference"),
        ("pypi:name==1.0/..", r"is no package reference"),
        ("pypi:name==1.0/a\0", r"is no package reference"),
    ],
)
def test_what_is_no_model(model_folder, tmp_path, monkeypatch, ref, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message) as caught:
        resolve(ref)
    assert "\n" not in str(caught.value)


_STARTS = ("", "hf:", "HF:a/b", "hf:a/b@", "hf:a/b:", "ollama:", "ollama:a:", "https://", "http:",
           "https://u:p@h:1/", "pypi:", "pypi:a==1/", "~", "./")  # fmt: skip
_ODD = st.text(st.sampled_from("a/.:@%?#\\\0\n -_=~[]1\xe9\udcff"), max_size=30)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    start=st.sampled_from(_STARTS),
    middle=_ODD | st.text(max_size=30) | st.just("x" * 300),
    end=st.sampled_from(("", ".gguf", "-00002-of-00003.gguf", "-00001-of-99999.gguf", "?x=.gguf")),
)
def test_whatever_is_typed_it_is_told_in_a_line_and_nothing_is_written(
    model_folder, monkeypatch, start, middle, end
):
    monkeypatch.chdir(model_folder.parent)
    with pytest.raises(SourceError) as caught:
        resolve(start + middle + end, may_fetch=False)
    assert "\n" not in str(caught.value)
    assert list(model_folder.parent.iterdir()) == []


def test_a_folder_s_files_are_shown(tmp_path):
    touch(tmp_path, "b.gguf", "a.gguf", "sub/c.gguf")
    with pytest.raises(SourceError, match=r"' is a folder; .* it holds a.gguf, b.gguf$"):
        resolve(tmp_path)


def test_cached_names(model_folder):
    touch(
        model_folder, "alpha-1b.Q4_0.gguf", "alpha-1b.Q8_0.gguf", "deep/down/beta.gguf", "notes.txt"
    )
    touch(model_folder, ".fetch-1/gamma.gguf")
    assert (
        resolve("alpha-1b.Q4_0")
        == resolve("alpha-1b.Q4_0.gguf")
        == model_folder / "alpha-1b.Q4_0.gguf"
    )
    assert resolve("alpha-1b.Q8") == model_folder / "alpha-1b.Q8_0.gguf"
    assert resolve("beta") == resolve("deep/down/beta") == resolve("be")
    assert resolve("deep/down/beta.gguf") == model_folder / "deep/down/beta.gguf"
    with pytest.raises(
        SourceError, match=r"'alpha' may be any of alpha-1b.Q4_0.gguf, alpha-1b.Q8_0"
    ):
        resolve("alpha")
    for absent in ("gamma", "notes", "eta"):
        with pytest.raises(SourceError, match=r"holds alpha-1b.Q4_0.gguf, .*deep/down/beta.gguf$"):
            resolve(absent)


def test_a_cached_file_that_was_cut_is_no_model(model_folder):
    touch(model_folder, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    for part, size in (("1", 4), ("2", 5)):
        record = Record(size=size, sha256="0" * 64, source="hf:a/b")
        write_record(model_folder / f"m-0000{part}-of-00002.gguf", record)
    with pytest.raises(
        SourceError, match=r"m-00002-of-00002.gguf' is damaged: it has 4 bytes, and 5 were fetched;"
        r" fetch it again: python -m minfer_jax.models download hf:a/b$"
    ):  # fmt: skip
        resolve("m")


def test_an_exact_name_is_not_a_prefix(model_folder):
    touch(model_folder, "m.gguf", "m-large.gguf", "a/twice.gguf", "b/twice.gguf", "twice-over.gguf")
    assert resolve("m") == model_folder / "m.gguf"
    with pytest.raises(SourceError, match=r"may be any of a/twice.gguf, b/twice.gguf in"):
        resolve("twice")
    assert resolve("b/twice") == model_folder / "b/twice.gguf"


def test_long_listings_are_cut(model_folder):
    touch(model_folder, *(f"m{number:02}.gguf" for number in range(25)))
    with pytest.raises(SourceError, match=r"m09.gguf and 15 more in"):
        resolve("m")


def test_split_models(model_folder, tmp_path, monkeypatch):
    names = [f"big-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    touch(model_folder, *names, "orphan-00002-of-00002.gguf")
    for ref in ("big", "bi", *names, *(name.removesuffix(".gguf") for name in names)):
        assert resolve(ref) == model_folder / names[0]
    assert resolve(model_folder / names[2]) == model_folder / names[0]
    with pytest.raises(
        SourceError, match=r"part of a split, and orphan-00001-of-00002.gguf is miss"
    ):
        resolve(model_folder / "orphan-00002-of-00002.gguf")
    with pytest.raises(SourceError, match=r"no model 'orphan'"):
        resolve("orphan")


def test_an_alias_comes_before_a_file_of_that_name(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "gemma3", "other")
    touch(model_folder, "gemma3.gguf", "other.gguf")
    monkeypatch.setattr(
        "minfer_jax.sources.references.fetch", lambda wanted, *_: Path(wanted.file_name)
    )
    assert resolve("gemma3") == Path("gemma-3-270m-q4_k_m.gguf")
    assert resolve("other") == Path("other")  # and an existing path before a cached name


def test_model_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MINFER_MODEL_DIR", raising=False)
    assert model_dir() == tmp_path / ".cache/minfer/models"
    monkeypatch.setenv("MINFER_MODEL_DIR", "")
    assert model_dir() == tmp_path / ".cache/minfer/models"
    monkeypatch.setenv("MINFER_MODEL_DIR", "~/m")
    assert model_dir() == tmp_path / "m"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINFER_MODEL_DIR", "m")
    assert model_dir() == tmp_path / "m"


def test_broken_home(monkeypatch, tmp_path):
    touch(tmp_path, "a.gguf")
    monkeypatch.delenv("MINFER_MODEL_DIR", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does without a home
    assert resolve(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    with pytest.raises(
        SourceError, match=r"home folder is not known; set HOME, or MINFER_MODEL_DIR"
    ):
        resolve("smollm2")
