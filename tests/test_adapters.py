"""Adapters of a loaded model: from files and flags, with scales, and what is kept of a text."""

from pathlib import Path

import numpy as np
import pytest

from minfer_jax import generate
from minfer_jax.adapter_flags import control_layers, scales
from minfer_jax.chat_session import SessionFile
from minfer_jax.conversation import Conversation
from minfer_jax.language_model import LanguageModel, load
from minfer_jax.model.lora_file import map_shapes, write_lora
from minfer_jax.state_file import StateError
from minfer_jax.usage import UsageError
from tests.helpers.gguf_builder import build_gguf, dense
from tests.helpers.ran import Ran
from tests.helpers.tiny_adapters import random_adapter
from tests.helpers.tiny_models import endless_text_model, save

IDS = [5, 90, 17, 33, 60, 71]
N_LAYER, WIDTH = 2, 64
pytestmark = pytest.mark.usefixtures("one_compile_cache", "logging_as_it_was")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """model.gguf, one.gguf and two.gguf, which are adapters, and vector.gguf."""
    folder = tmp_path_factory.mktemp("adapters")
    data = endless_text_model(n_layer=N_LAYER, weight_type="Q4_0", n_ctx=128)
    base = save(folder, data, "model.gguf")
    shapes = map_shapes(base, "blk.*")
    write_lora(folder / "one.gguf", random_adapter(shapes, 2), base.architecture)
    some = map_shapes(base, "*.attn_[qv].weight") | map_shapes(base, "[to]*")
    write_lora(folder / "two.gguf", random_adapter(some, 3, seed=5), base.architecture)
    direction = np.random.default_rng(2).normal(size=WIDTH).astype(np.float32)
    keys = {"general.architecture": "controlvector", "controlvector.model_hint": "llama"}
    (folder / "vector.gguf").write_bytes(build_gguf(keys, {"direction.1": dense(direction)}))
    return folder


def loaded(folder: Path, one: float = 1.0, two: float = -0.5, vector: float = 2.0) -> LanguageModel:
    return load(
        folder / "model.gguf",
        precision="highest",
        lora={folder / "one.gguf": one, folder / "two.gguf": two},
        control_vectors={str(folder / "vector.gguf"): vector},
    )


@pytest.fixture(scope="module")
def model(folder) -> LanguageModel:
    return loaded(folder)


@pytest.fixture(scope="module")
def plain(folder) -> LanguageModel:
    return load(folder / "model.gguf", precision="highest")


def greedy(model: LanguageModel, n: int = 8) -> list[int]:
    return list(model.generate_tokens(IDS, n, temperature=0.0))


def test_scales_are_set_without_a_compile(folder, model, plain):
    names = [str(folder / f"{name}.gguf") for name in ("one", "two", "vector")]
    whole = model.logits(IDS)
    np.testing.assert_allclose(model.logits(IDS, chunk=1), whole, atol=1e-4, rtol=1e-4)
    tokens = greedy(model)
    n = len(model.engine.compiles)
    model.set_scales({names[0]: 0.25}, {names[2]: -1})
    assert [a.scale for a in model.adapters.lora.values()] == [0.25, -0.5]
    got = model.logits(IDS)
    np.testing.assert_array_equal(got, loaded(folder, 0.25, -0.5, -1.0).logits(IDS))
    assert np.abs(got - whole).max() > 0.1
    model.set_scales({Path(name): 0 for name in names[:2]}, {names[2]: 0})
    np.testing.assert_allclose(model.logits(IDS), plain.logits(IDS), atol=1e-4)
    model.set_scales(dict(zip(names[:2], (1.0, -0.5), strict=True)), {names[2]: 2.0})
    np.testing.assert_array_equal(model.logits(IDS), whole)
    assert greedy(model) == tokens
    assert len(model.engine.compiles) == n


@pytest.mark.parametrize(
    ("lora", "vectors", "why"),
    [
        (
            {"three.gguf": 1.0},
            {},
            r"three.gguf is no LoRA adapter of this model, which has: /.*two",
        ),
        ({}, {"one.gguf": 1.0}, r"one.gguf is no control vector of this model, which has: /.*vec"),
        ({"one.gguf": float("nan")}, {}, "one.gguf: the scale is nan, expected a finite number"),
        ({"one.gguf": "1"}, {}, "one.gguf: the scale is '1', expected a finite number"),
    ],
)
def test_scales_that_are_refused(model, lora, vectors, why):
    before = model.engine.params
    with pytest.raises(ValueError, match=why):
        model.set_scales(lora, vectors)
    assert model.engine.params is before


def test_what_is_held_is_of_the_scales_that_it_was_run_with(folder, model, tmp_path):
    name = str(folder / "one.gguf")
    before = greedy(model, 12)
    assert greedy(model, 12) == before and model.stats.n_reused > 0
    list(model.generate_tokens(IDS, 4, temperature=0.0))
    model.set_scales({name: -1.0})
    model.save_state(tmp_path / "other.state")  # holds no keys and values: they were of scale 1
    other = greedy(model, 12)
    assert model.stats.n_reused == 0 and other != before
    model.load_state(tmp_path / "other.state")
    expected = list(loaded(folder, -1.0).generate_tokens([*IDS, *before[:4]], 8, temperature=0.0))
    assert list(model.continue_tokens(8)) == expected
    model.set_scales({name: 1.0})
    assert greedy(model, 12) == before


def test_a_state_is_bound_to_adapters_and_scales(folder, model, plain, tmp_path):
    expected = greedy(model, 12)
    list(model.generate_tokens(IDS, 5, temperature=0.0))
    model.save_state(tmp_path / "state")
    same = loaded(folder)
    same.load_state(tmp_path / "state")
    assert list(same.continue_tokens(7)) == expected[5:]
    assert same.stats.n_reused > 0
    why = "saved with the same model file, but not with the adapters and scales of now"
    with pytest.raises(StateError, match=why):
        plain.load_state(tmp_path / "state")
    same.set_scales({folder / "two.gguf": -0.25})
    with pytest.raises(StateError, match=why):
        same.load_state(tmp_path / "state")
    greedy(plain)
    plain.save_state(tmp_path / "state")
    with pytest.raises(StateError, match=why):
        model.load_state(tmp_path / "state")


def test_the_state_of_a_conversation_is_bound_to_them_too(model, plain, tmp_path):
    chat = Conversation(model, max_tokens=4, temperature=0.0)
    list(chat.say("hi"))
    kept = SessionFile(tmp_path / "talk.json")
    kept.save_state(chat)
    assert "tokens need not be run again" in kept.restore_state(
        Conversation(model, messages=chat.messages)
    )
    said = kept.restore_state(Conversation(plain, messages=chat.messages))
    assert "the messages will be run again: " in said and "adapters and scales" in said


def test_what_is_refused_at_load(folder):
    path = folder / "model.gguf"
    vector = {folder / "vector.gguf": 1.0}
    with pytest.raises(ValueError, match=r"model.gguf: general.type is None, .*: it is no adapter"):
        load(path, lora={path: 1.0})
    with pytest.raises(ValueError, match=r"none.gguf"):
        load(path, lora={folder / "none.gguf": 1.0})
    with pytest.raises(
        ValueError, match="layers 0 to 1 are asked for, expected some of 1-1: a con"
    ):
        load(path, control_vectors=vector, control_layers=(0, 1))
    with pytest.raises(ValueError, match="a range of layers is given, but no control vector"):
        load(path, control_layers=(1, 1))
    with pytest.raises(ValueError, match="the scale is inf"):
        load(path, control_vectors={folder / "vector.gguf": float("inf")})


# Flags


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.gguf", {"a.gguf": 1.0}),
        ("a.gguf:0.5", {"a.gguf": 0.5}),
        ("/x:y/a.gguf:-2", {"/x:y/a.gguf": -2.0}),
        ("hf:org/name:Q8_0", {"hf:org/name:Q8_0": 1.0}),
        ("hf:org/name:Q8_0:1e-1", {"hf:org/name:Q8_0": 0.1}),
    ],
)
def test_a_file_and_its_scale(value, expected):
    assert scales("lora", [value]) == expected


def test_a_file_that_is_named_like_a_scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a:2").touch()
    assert scales("lora", ["a:2", "b:2"]) == {"a:2": 1.0, "b": 2.0}


@pytest.mark.parametrize("value", ["", ":1", "a.gguf:nan", "a.gguf:inf"])
def test_a_scale_that_is_none(value):
    with pytest.raises(UsageError, match=f"--lora is '{value}', expected FILE or FILE:SCALE"):
        scales("lora", [value])


def test_a_file_that_is_given_twice():
    with pytest.raises(UsageError, match=r"--lora is given twice for a.gguf"):
        scales("lora", ["a.gguf:1", "a.gguf"])


def test_a_range_of_layers():
    assert control_layers(None) is None and control_layers("8-20") == (8, 20)
    for wrong in ("8", "20-8", "-1-3", "8-20-", "a-b", "1-9999999"):
        with pytest.raises(UsageError, match="expected such as 8-20"):
            control_layers(wrong)


def test_the_command(folder, capsys):
    def run(*argv: str) -> Ran:
        capsys.readouterr()
        model = str(folder / "model.gguf")
        flags = ("--greedy", "-n", "8", "--precision", "highest", "--no-template")
        return Ran(generate.main(["generate", model, "hello", *flags, *argv]), *capsys.readouterr())

    lora = ("--lora", f"{folder}/one.gguf", "--lora", f"{folder}/two.gguf:-0.5")
    vector = ("--control-vector", f"{folder}/vector.gguf:2", "--control-vector-layer-range", "1-1")
    ran = run(*lora, *vector)
    options = {"max_tokens": 8, "temperature": 0.0, "template": False}
    assert (ran.status, ran.out) == (0, loaded(folder).generate("hello", **options))
    refused = run("--lora", f"{folder}/vector.gguf")
    assert (refused.status, refused.out) == (1, "")
    last = refused.err.splitlines()[-1]
    assert last.startswith("error: ") and last.endswith("expected 'adapter': it is no adapter")
    assert run("--lora", "x.gguf:nan").status == 2
