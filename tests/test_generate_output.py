"""`python -m minfer_jax.generate` under constraints, and what it writes as JSON."""

import json
import re

import numpy as np
import pytest

from minfer_jax import generate
from minfer_jax.language_model import LanguageModel, load
from tests.helpers import tiny_models

pytestmark = pytest.mark.usefixtures("cache_of_commands")

HOT = ("--temp", "2", "--top-k", "0", "--top-p", "1", "--seed", "3")
DRAWN = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("output")
    return str(tiny_models.save(folder, tiny_models.command_model()).path)


@pytest.fixture(scope="module")
def model(path) -> LanguageModel:
    return load(path)


@pytest.fixture
def run(capsys, path):
    """Runs the command in this process; (status, lines of standard output, standard error)."""

    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = generate.main(["generate", path, "hello", *argv])
        return status, *capsys.readouterr()

    return call


def test_each_token_with_how_likely_it_was(run, model):
    status, out, err = run(*HOT, "-n", "12", "--logprobs", "2", "--ignore-eos")
    assert status == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert len(told) == 12
    ids = [one["id"] for one in told]
    text = model.generate("hello", max_tokens=12, ignore_eos=True, **DRAWN)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(ids, continues=True) == text
    assert b"".join(bytes(one["bytes"]) for one in told).decode("utf-8", "replace") == text
    logits = model.logits([*model.encode_prompt("hello"), *ids])[-13:-1]
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for one, row in zip(told, expected, strict=True):
        assert one["logprob"] == pytest.approx(row[one["id"]], abs=0.05)
        first, second = one["top_logprobs"]
        assert first["logprob"] >= second["logprob"] >= np.sort(row)[-3] - 0.05
        assert first.keys() == one.keys() - {"top_logprobs"}


def test_several_answers(run, model):
    status, out, err = run(*HOT, "-n", "6", "--samples", "3")
    assert status == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    texts = model.generate_many("hello", 3, max_tokens=6, **DRAWN)
    assert [one["text"] for one in told] == texts
    assert [one["index"] for one in told] == [0, 1, 2]
    assert {one["finish_reason"] for one in told} <= {"length", "stop"}
    assert len(set(texts)) > 1
    status, out, err = run("-n", "0", "--samples", "2")
    assert status == 0, err
    empty = [{"index": i, "text": "", "finish_reason": "length"} for i in range(2)]
    assert [json.loads(line) for line in out.splitlines()] == empty


@pytest.mark.parametrize("seed", ["1", "2"])
def test_an_answer_in_json(run, tmp_path, seed):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": [True]}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    flags = ["--json-schema", f"@{tmp_path / 'schema.json'}", "-n", "100", "--seed", seed]
    status, out, err = run(*HOT, *flags)
    assert status == 0, err
    assert "Finished: stop" in err
    answer = json.loads(out)
    assert answer == {"n": answer["n"], "b": True}
    assert answer["n"] in range(10)


def test_an_expression_and_a_bias(run):
    bias = ["--logit-bias", f"{3 + ord('a')}-inf"]  # three control tokens, then the bytes
    for flags, expected in (([], {"a", "b"}), (bias, {"b"})):
        _, out, _ = run(*HOT, "--regex", "[ab]{40}", "-n", "60", *flags)
        assert len(out) == 40
        assert set(out) == expected


def test_guesses_from_the_text_change_nothing(run):
    """How many there are depends on what was measured; that they may be checked does not."""
    greedy = ("--greedy", "-n", "60", "--repeat-penalty", "1")
    _, expected, err = run(*greedy)
    assert "verify" not in err
    status, out, err = run(*greedy, "--draft-ngram")
    assert (status, out) == (0, expected), err
    assert re.search(r"^Compiled: .*verify", err, re.MULTILINE)


def test_a_draft_model(run, path, tmp_path):
    small = tiny_models.save(tmp_path, tiny_models.command_model(seed=1))
    other = tiny_models.save(tmp_path, tiny_models.tiny_model("llama", n_layer=1), "other.gguf")
    greedy = ("--greedy", "-n", "30")
    _, expected, _ = run(*greedy)
    status, out, err = run(*greedy, "--draft", str(small.path), "--draft-max", "7")
    assert (status, out) == (0, expected), err
    assert re.search(r"^Compiled: .*verify", err, re.MULTILINE)
    status, out, err = run(*greedy, "--draft", str(other.path))
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: ")
    status, out, err = run(*greedy, "--draft", "no-such-model")
    assert (status, out) == (1, "")
    assert "Model loaded" not in err, "it is looked for before anything long begins"
