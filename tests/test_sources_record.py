"""Records of fetched files, and the names of split models."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer_jax.sources.record import (
    Record,
    check_size,
    is_present,
    read_record,
    record_path,
    sha256_of,
    write_record,
)
from minfer_jax.sources.split import all_parts, base_name, first_part, models_of
from minfer_jax.sources.transfer import SourceError
from tests.helpers.servers import sha256

RECORD = Record(size=4, sha256="ab", source="smollm2")


def test_a_file_is_present_while_it_has_the_size_of_its_record(tmp_path):
    path = tmp_path / "a.gguf"
    write_record(path, RECORD)
    assert read_record(path) == RECORD and not is_present(path)
    path.write_bytes(b"GGUF")
    assert is_present(path)
    check_size(path)
    path.write_bytes(b"GGU")
    assert not is_present(path)
    with pytest.raises(SourceError, match=r"has 3 bytes, and 4 were fetched; .* download smollm2"):
        check_size(path)
    record_path(path).unlink()
    assert not is_present(path)
    check_size(path)  # nothing is known of it


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"size": 4}', '{"size": "4", "sha256": "", "source": ""}',
     '{"size": 4, "sha256": "", "source": "", "more": 1}', "\xff" * 10, "[" * 60_000],
)  # fmt: skip
def test_a_record_that_is_none(tmp_path, text):
    record_path(tmp_path / "a.gguf").write_text(text, encoding="latin-1")
    assert read_record(tmp_path / "a.gguf") is None


def test_the_form_of_a_record(tmp_path):
    write_record(tmp_path / "a.gguf", RECORD)
    text = (tmp_path / "a.gguf.json").read_text()
    assert json.loads(text) == {"size": 4, "sha256": "ab", "source": "smollm2"}


def test_a_file_s_digest(tmp_path):
    (tmp_path / "a").write_bytes(b"GGUF" * 1_000_000)
    assert sha256_of(tmp_path / "a") == sha256(b"GGUF" * 1_000_000)


@given(
    base=st.text(st.characters(exclude_characters="\n")), count=st.integers(1, 40), data=st.data()
)
def test_any_part_stands_for_the_whole(base, count, data):
    base = f"a{base}"
    parts = [f"{base}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
    one = data.draw(st.sampled_from(parts))
    assert list(all_parts(one)) == parts
    assert base_name(one) == base
    assert first_part(one.removesuffix(".gguf")) == parts[0].removesuffix(".gguf")
    assert models_of(parts) == {base: tuple(parts)}
    assert models_of(set(parts) - {one}) == {}


@pytest.mark.parametrize("name", ["a.gguf", "a-00001-of-0002.gguf", "a-1-of-2.gguf", "b/a.gguf"])
def test_names_that_are_no_parts(name):
    assert all_parts(name) == (name,)
    assert models_of([name, "README.md"]) == {name.removesuffix(".gguf"): (name,)}


def test_a_part_of_absurdly_many():
    assert all_parts("a-00001-of-99999.gguf") == ("a-00001-of-99999.gguf",)
    assert all_parts("a-00000-of-00000.gguf") == ("a-00000-of-00000.gguf",)
