"""Presets: what is shipped, what a file may say, and how the rest is refused."""

import inspect
import tomllib
from pathlib import Path

import pytest

from minfer_jax import language_model, presets
from minfer_jax.presets import PresetError
from minfer_jax.sampling import SamplingParams
from tests.helpers import tiny_models

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("chat", "code", "deterministic", "long-context")


@pytest.fixture
def write(tmp_path):
    """Writes a preset and returns its path."""

    def call(text: str | bytes) -> Path:
        path = tmp_path / "mine.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return call


def test_the_names():
    assert presets.names() == SHIPPED
    assert presets.folder() == ROOT / "configs"


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped(name):
    preset = presets.load(name)
    assert preset.name == name
    assert 10 < len(preset.about) <= 60, "for a line of --config list"
    assert preset.load or preset.generate
    written = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8"))
    assert written == {"about": preset.about, "load": preset.load, "generate": preset.generate}


def test_what_the_shipped_ones_are_for():
    assert presets.load("deterministic").generate["temperature"] == 0
    assert presets.load("deterministic").load["precision"] == "highest"
    assert presets.load("code").generate["temperature"] < SamplingParams.temperature
    assert presets.load("long-context").load["n_ctx"] > presets.load("chat").load["n_ctx"]


def test_keys_are_arguments_of_the_functions():
    load = inspect.signature(language_model.load).parameters
    stream = inspect.signature(language_model.LanguageModel.stream).parameters
    fields = SamplingParams.__dataclass_fields__
    assert presets._KEYS["load"].keys() <= load.keys()
    assert presets._KEYS["generate"].keys() <= stream.keys() | fields.keys()
    assert fields.keys() <= presets._KEYS["generate"].keys()


def test_a_model_takes_them(write, tmp_path):
    """In place of the arguments, with the same effect."""
    path = tiny_models.save(tmp_path, tiny_models.tiny_text_model(n_layer=1)).path
    preset = presets.load(
        write(
            '[load]\nn_ctx = 64\nprecision = "highest"\nprefill_chunk = 32\n'
            '[generate]\nmax_tokens = 8\ntemperature = 2\ntop_k = 0\nseed = 3\nstop = ["\\u0000"]\n'
        )
    )
    model = language_model.load(path, **preset.load)
    assert (model.engine.n_ctx, model.cfg.precision) == (64, "highest")
    text = model.generate("hello", **preset.generate)
    assert text == model.generate("hello", max_tokens=8, temperature=2, top_k=0, seed=3)


def test_a_file_of_one_s_own(write, monkeypatch):
    path = write("[generate]\r\ntop_k = 5\r\nseed = -1\r\n".encode("utf-8-sig"))
    preset = presets.load(path)
    assert (preset.name, preset.about) == (str(path), "")
    assert (preset.load, preset.generate) == ({}, {"top_k": 5, "seed": -1})
    monkeypatch.chdir(path.parent)
    assert presets.load("mine.toml").generate == presets.load("./mine.toml").generate
    assert presets.load(write("")).generate == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[generate]\ntemprature = 1", "'temprature' in [generate] (did you mean 'temperature'?)"),
        ("[generate]\nbanana = 1", "'banana' in [generate]: known are max_tokens, stop, "),
        ("[generate]\nn_ctx = 1", "unknown key 'n_ctx' in [generate]; it belongs in [load]"),
        ("n_ctx = 1", "unknown key 'n_ctx'; it belongs in [load]: expected are [load], [generate]"),
        ("[generat]\n", "unknown key 'generat' (did you mean 'generate'?)"),
        ("load = 3", "load is 3, expected a table: [load]"),
        ("about = 3", "about is 3, expected a text"),
        ("[load]\nn_ctx = 1.0", "n_ctx is 1.0, expected a whole number"),
        ("[load]\nn_ctx = true", "n_ctx is True, expected a whole number"),
        ("[load]\nn_ctx = 0", "n_ctx is 0, expected 1 or more"),
        ("[load]\nprecision = 'low'", "precision is 'low', expected one of highest, default"),
        ("[load]\ncache_type = 'f8'", "expected one of f32, f16, bf16, q8_0"),
        ("[generate]\ntemperature = 'hot'", "temperature is 'hot', expected a number"),
        ("[generate]\ntemperature = true", "temperature is True, expected a number"),
        ("[generate]\ntemperature = nan", "temperature must be >= 0 and finite, got nan"),
        ("[generate]\ntop_k = -1", "top_k must be an integer >= 0"),
        ("[generate]\nseed = -2", "seed must be an integer from 0"),
        ("[generate]\nstop = 'END'", "stop is 'END', expected a list of texts"),
        ("[generate]\nstop = [1]", "stop is [1], expected a list of texts"),
        ("[generate]\ncontext_shift = 1", "context_shift is 1, expected true or false"),
        ("[generate]\nmax_tokens = -1", "max_tokens is -1, expected 0 or more"),
        ("[generate\n", "line 1"),
        ("[generate]\ntop_k = 1\ntop_k = 2", "at end of document"),
        ("x = " + "[" * 5000, "nested too deeply"),
        ("x = " + "9" * 5000, "integer string conversion"),
        ("#" * 70_000, "more than 65536 bytes"),
        (b"about = '\xff'", "invalid start byte"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_in_one_line(write, text, message):
    path = write(text)
    with pytest.raises(PresetError) as caught:
        presets.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cod", "there is no preset 'cod' (did you mean 'code'?): they are chat, code, "),
        ("xyz", "there is no preset 'xyz': they are chat, code, deterministic, long-context"),
        ("", "there is no preset ''"),
        ("none.toml", "none.toml: No such file or directory"),
        ("./none", "none: No such file or directory"),
        (".toml/", ".toml: No such file or directory"),
    ],
)
def test_names_that_there_are_not(name, message):
    with pytest.raises(PresetError) as caught:
        presets.load(name)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_folder_is_no_preset(tmp_path):
    with pytest.raises(PresetError, match="Is a directory"):
        presets.load(tmp_path)
