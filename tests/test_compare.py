"""The compare command: what it finds, and what it refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import minfer_jax
from minfer_jax import compare, compare_layers
from minfer_jax.compare_flags import Spec, help_text, parse, spec
from minfer_jax.divergence import log_softmax
from minfer_jax.perplexity import estimate, windows
from minfer_jax.usage import UsageError
from tests.helpers.gguf_builder import dense
from tests.helpers.ran import Ran
from tests.helpers.tiny_models import command_model, save, tiny_text_model

pytestmark = pytest.mark.usefixtures("cache_of_commands", "logging_as_it_was")

N_LAYER, CHANGED = 4, 2
TEXT = "hello world, hello | wor\x1b[2Jld; he tells all of it. " * 3


def model(**options) -> bytes:
    return tiny_text_model(n_layer=N_LAYER, n_ctx=256, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models which differ in one layer's MLP, and one of another vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    a = save(folder, model(), "a.gguf")
    name = f"blk.{CHANGED}.ffn_down.weight"
    shape = a.tensors[name].shape
    other = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    save(folder, model(tensors={name: dense(0.1 * other)}), "b.gguf")
    save(folder, model(n_ff=96), "wide.gguf")
    save(folder, tiny_text_model(n_layer=2, n_ctx=256), "short.gguf")
    save(folder, model(metadata={"tokenizer.ggml.add_bos_token": True}), "bos.gguf")
    words = list(a.metadata["tokenizer.ggml.tokens"])
    words[5] = "other"
    save(folder, model(metadata={"tokenizer.ggml.tokens": words}), "words.gguf")
    return folder


@pytest.fixture
def run(folder, capsys, monkeypatch) -> Callable[..., Ran]:
    """Runs the command in this process, in the models' folder."""

    def call(*argv: object) -> Ran:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        status = compare.main(["compare", *map(str, argv)])
        return Ran(status, *capsys.readouterr())

    return call


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model", "precision", "cache_type"),
    [
        ("smollm2@xla@highest", "smollm2", "highest", None),
        ("smollm2", "smollm2", "default", None),
        ("smollm2@highest", "smollm2", "highest", None),
        ("smollm2@q8_0", "smollm2", "default", "q8_0"),
        ("smollm2@highest@f16", "smollm2", "highest", "f16"),
        ("smollm2@f16@highest", "smollm2", "highest", "f16"),
        ("hf:a/b@main", "hf:a/b@main", "default", None),
        ("hf:a/b@main:Q8_0@highest", "hf:a/b@main:Q8_0", "highest", None),
        ("you@home/m.gguf", "you@home/m.gguf", "default", None),
        ("@highest", "@highest", "default", None),
    ],
)
def test_what_a_side_is(name, model, precision, cache_type):
    kernels = "xla" if "@xla" in name else "auto"
    assert spec(name) == Spec(
        name=name, model=model, precision=precision, cache_type=cache_type, kernels=kernels
    )


def test_a_precision_that_there_is_not():
    with pytest.raises(UsageError, match=r"'higest' is no .* \(did you mean 'highest'\?\)"):
        spec("smollm2@higest")
    with pytest.raises(
        UsageError, match="'exact' is no precision, cache type or kernels, expected one of"
    ):
        spec("smollm2@exact")


def test_options(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("some words\n")
    options = parse(["compare", "a", "b"])
    assert (options.n_ctx, options.perplexity, options.worst, options.layers) == (
        *(4096, False, 10, True),
    )
    assert "lighthouse" in options.text
    options = parse(["compare", "--perplexity", str(text), "a", "--chunks", "3"])
    assert (options.n_ctx, options.perplexity, options.chunks) == (512, True, 3)
    assert (options.text, options.layers) == ("some words", False)
    options = parse(["compare", "a", "-f", str(text), "b", "--nolayers", "--plot", "x.PNG"])
    assert (options.text, options.layers, options.plot) == ("some words", False, Path("x.PNG"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "0 models, expected A B"),
        (["a"], "1 models, expected A B .one model goes with --perplexity"),
        (["a", "b", "c", "--perplexity", "t.txt"], "3 models, expected MODEL, or A B;"),
        (["a", "b", "--chunks", "2"], "--chunks needs --perplexity"),
        (["a", "b", "--chunks", "0"], "--chunks is 0, expected 1 or more"),
        (["a", "b", "--n-ctx", "3"], "--n-ctx is 3, expected 4 or more"),
        (["a", "--perplexity", "t.txt", "--plot", "x.png"], "--plot needs two models"),
        (["a", "b", "--json", "no/x.json"], "'no/x.json' is in a folder that does not exist"),
        (["a", "b", "--json", "."], "'.' is a folder"),
        (["a", "b", "--text", "x", "-f", "y"], "--file and --text: give one of them"),
        (["a", "b", "-f", "nothere.txt"], "the text file 'nothere.txt' does not exist"),
    ],
)
def test_wrong_usage(words, message):
    with pytest.raises(UsageError, match=message):
        parse(["compare", *words])


def test_help():
    assert help_text().startswith("usage: python -m minfer_jax.compare [flags] A B\n")
    assert max(map(len, help_text().splitlines())) < 100


# --- two models -----------------------------------------------------------------------------------


def test_two_models(run, folder, tmp_path):
    found = run("a.gguf@highest", "b.gguf@highest", "--text", TEXT, "--json", tmp_path / "o.json")
    assert found.status == 0, found.err
    told = json.loads((tmp_path / "o.json").read_text())

    a, b = (minfer_jax.load(folder / f"{n}.gguf", n_ctx=256, precision="highest") for n in "ab")
    assert a.tokenizer is not None
    ids = a.tokenizer.encode(TEXT)
    (logs_a, probs_a), (logs_b, _) = (log_softmax(m.logits(ids)[:-1]) for m in (a, b))
    at, targets = np.arange(len(ids) - 1), np.array(ids[1:])
    kl = (probs_a * (logs_a - logs_b)).sum(-1)
    nll = [-logs[at, targets] for logs in (logs_a, logs_b)]
    rows = told["positions"]
    np.testing.assert_allclose(rows["kl_a_b"], kl, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(rows["nll"], nll, atol=1e-5)
    assert (rows["position"], rows["token"]) == (at.tolist(), ids[1:])
    assert rows["top"] == [logs.argmax(-1).tolist() for logs in (logs_a, logs_b)]
    assert told["kl_a_b"]["mean"] == pytest.approx(kl.mean(), rel=1e-3)
    assert told["models"][0]["nll"]["value"] == pytest.approx(nll[0].mean(), rel=1e-5)
    assert told["nll_b_less_a"]["value"] == pytest.approx((nll[1] - nll[0]).mean(), abs=1e-5)
    same = (logs_a.argmax(-1) == logs_b.argmax(-1)).mean()
    assert told["same_top"] == pytest.approx(same) and 0 < same < 1

    # The planted layer is found, and nothing before it differs.
    layers = told["layers"]
    assert layers["names"] == ["embd", *(f"blk.{i}.residual" for i in range(N_LAYER))]
    assert layers["parting"] == f"blk.{CHANGED}.residual"
    assert not any(layers["apart"][: 1 + CHANGED]) and all(layers["apart"][1 + CHANGED :])
    assert f"They part most in blk.{CHANGED}.residual" in found.out

    # The worst position comes first, with its context and what each says; nothing in it is obeyed.
    lines = found.out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| worst after"))
    worst = int(kl.argmax())
    row = lines[head + 2]
    assert f" {worst} | {kl[worst]:.2e} " in row
    assert repr(a.tokenizer.decode([ids[worst + 1]])) in row
    for logs in (logs_a, logs_b):
        assert repr(a.tokenizer.decode([int(logs[worst].argmax())], skip_special=False)) in row
    assert all(line.isprintable() for line in lines)
    assert len([line for line in lines[head:] if "e-" in line or "e+" in line]) >= 10


def test_a_model_and_itself(run):
    found = run("a.gguf", "a.gguf", "--text", TEXT, "--worst", "0")
    assert found.status == 0, found.err
    assert "(100.00%)" in found.out and "They do not part in any layer." in found.out
    assert "0.00e+00 | 0.00e+00 | 0.00e+00 | 0.00e+00" in found.out
    assert "worst after" not in found.out


def test_two_precisions(run):
    found = run("a.gguf@highest", "a.gguf@bf16@xla", "--text", TEXT)
    assert found.status == 0, found.err
    rows = [line.split() for line in found.out.splitlines()[2:4]]
    assert [row[4] for row in rows] == ["highest", "default"]
    assert [row[6] for row in rows] == ["f32", "bf16"]
    assert "0.00e+00 | 0.00e+00 | 0.00e+00 | 0.00e+00" not in found.out


def test_a_long_text_is_cut_and_models_of_other_shapes_have_no_layers(run):
    found = run("a.gguf", "short.gguf", "--text", TEXT * 3, "--n-ctx", "40")
    assert found.status == 0, found.err
    assert "the first 40 are compared" in found.err
    assert "The layers are not compared" in found.err
    assert "Over 39 positions." in found.out and "They part" not in found.out


def test_another_vocabulary_is_refused(run):
    found = run("a.gguf", "words.gguf", "--text", TEXT)
    assert (found.status, found.out) == (1, "")
    last = found.err.splitlines()[-1]
    assert last.startswith("error: words.gguf has another vocabulary: its token 5 is 'other'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.gguf", "nothere.gguf"], "nothere.gguf"),
        (["a.gguf", "b.gguf", "--text", "x"], "the text has 1 tokens, expected 2 or more"),
        (["a.gguf", "--perplexity", "t.txt"], "a window has 512 tokens, and the model 256"),
        (["a.gguf", "--perplexity", "t.txt", "--n-ctx", "128"], "two windows of 128 take 256"),
    ],
)
def test_what_cannot_be_run(run, folder, words, message):
    (folder / "t.txt").write_text("hello " * 9)
    found = run(*words)
    assert (found.status, found.out) == (1, "")
    assert message in found.err.splitlines()[-1]
    assert found.err.splitlines()[-1].startswith("error: ")


# --- perplexity -----------------------------------------------------------------------------------


def test_perplexity_of_one_model(run, folder, tmp_path):
    """Of a vocabulary with BOS; the figure is that of a window at a time."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n")
    found = run("bos.gguf@highest", "--perplexity", path, "--n-ctx", "16", "--chunks", "4")
    assert found.status == 0, found.err
    model = minfer_jax.load(folder / "bos.gguf", n_ctx=16, precision="highest")
    assert model.tokenizer is not None and model.tokenizer.bos_id == 0
    ids, nll = model.tokenizer.encode(TEXT), []
    for window in windows(ids, 16, 0, 4):
        assert window.ids[0] == 0
        logs, _ = log_softmax(model.logits(window.ids.tolist())[8:])
        nll.append(-logs[np.arange(7), window.targets])
    figure = estimate(np.concatenate(nll)).perplexity
    assert f" {figure.value:.2f}" in found.out and "Over 28 positions in 4 windows." in found.out
    assert "KL" not in found.out


def test_a_perplexity_beyond_all_numbers(run, folder, tmp_path):
    save(folder, command_model(), "sure.gguf")  # bytes that are not seen are out of the question
    (tmp_path / "text.txt").write_text("\n" * 40)
    words = "sure.gguf", "--perplexity", tmp_path / "text.txt", "--n-ctx", "16"
    found = run(*words, "--json", tmp_path / "o.json")
    assert found.status == 0, found.err
    assert " inf |" in found.out
    told = json.loads((tmp_path / "o.json").read_text())["models"][0]
    assert told["perplexity"] == {"value": None, "error": None} and told["nll"]["value"] > 1e8


def test_perplexity_of_two_models(run, tmp_path):
    path, out = tmp_path / "text.txt", tmp_path / "o.json"
    path.write_text(TEXT)
    found = run("a.gguf", "b.gguf", "--perplexity", path, "--n-ctx", "16", "--json", out)
    assert found.status == 0, found.err
    told = json.loads(out.read_text())
    n = told["n_windows"] * 7
    assert told["n_positions"] == n == len(told["positions"]["kl_a_b"])
    assert told["positions"]["position"][:8] == [*range(8, 15), 24]
    assert told["layers"]["n_tokens"] == 15
    assert [m["name"] for m in told["models"]] == ["a.gguf", "b.gguf"]


# --- pictures -------------------------------------------------------------------------------------


def test_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    found = run("a.gguf", "b.gguf", "--text", TEXT, "--plot", tmp_path / "o.png")
    assert found.status == 0, found.err
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG\r\n")
    found = run("a.gguf", "a.gguf", "--text", TEXT, "--nolayers", "--plot", tmp_path / "o.svg")
    assert found.status == 0, found.err
    assert b"<svg" in (tmp_path / "o.svg").read_bytes()


def test_no_picture_without_matplotlib(run, monkeypatch):
    """Told before anything long begins."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = run("a.gguf", "b.gguf", "--plot", "o.png")
    assert found == (1, "", "error: a plot needs matplotlib: pip install 'minfer-jax[plot]'\n")


# --- layers ---------------------------------------------------------------------------------------


def test_relative_differences():
    a = np.array([[3, 4], [0, 0], [0, 0], [1e-20, 0]], np.float32)
    b = np.array([[3, 5], [0, 0], [0, 2], [3e-20, 0]], np.float32)
    np.testing.assert_allclose(compare_layers.relative(a, b), [0.2, 0, 2, 2])
