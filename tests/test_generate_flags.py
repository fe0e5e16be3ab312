"""The command line of `generate`: what each flag comes to, and how wrong ones are refused."""

import dataclasses
import re

import pytest

from minfer_jax import presets, sources
from minfer_jax.dump_flags import GraphDump
from minfer_jax.generate_flags import FLAGS, Options, conversation, help_all, help_text, parse
from minfer_jax.model_flags import ModelOptions
from minfer_jax.sampling import SamplingParams
from minfer_jax.sampling.order import LETTERS
from minfer_jax.usage import UsageError

COMMON = ModelOptions(
    model=sources.DEFAULT_MODEL,
    alone=False,
    prompt=None,
    system=None,
    sampling=SamplingParams(),
    seed_drawn=False,
    max_tokens=512,
    stop=(),
    n_ctx=4096,
    precision="default",
    cache_type=None,
    prefill_chunk=512,
    threads=None,
    device="auto",
    kernels="auto",
    steps_per_dispatch=None,
    meta=False,
    lora={},
    control_vectors={},
    control_layers=None,
)
DEFAULTS = Options(
    common=COMMON,
    template=None,
    context_shift=False,
    keep=0,
    extra={},
    logprobs=None,
    samples=1,
    draft=None,
    draft_max=None,
    graph=GraphDump(dot=None, json=None, xla=False),
)
IN_COMMON = {field.name for field in dataclasses.fields(ModelOptions)}
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}


def options(*argv: str) -> Options:
    return parse(["generate", *argv])


def test_without_flags():
    assert options() == DEFAULTS


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--temp 1.5", "temperature", 1.5),
        ("--temp=2", "temperature", 2.0),
        ("-temp 0", "temperature", 0.0),
        ("--greedy", "temperature", 0.0),
        ("--greedy --temp 1", "temperature", 0.0),
        ("--nogreedy", "temperature", 0.8),
        ("--top-k 5", "top_k", 5),
        ("--top-k 0", "top_k", 0),
        ("--top-p 0.5", "top_p", 0.5),
        ("--min-p .25", "min_p", 0.25),
        ("--repeat-penalty 1.25", "repeat_penalty", 1.25),
        ("--frequency-penalty -0.5", "frequency_penalty", -0.5),
        ("--presence-penalty 0.5", "presence_penalty", 0.5),
        ("--repeat-last-n -1", "penalty_last_n", -1),
        ("--typical 0.9", "typical_p", 0.9),
        ("--top-nsigma 1", "top_n_sigma", 1.0),
        ("--xtc-probability 0.5", "xtc_probability", 0.5),
        ("--xtc-threshold 0.2", "xtc_threshold", 0.2),
        ("--dynatemp-range 0.5", "dynatemp_range", 0.5),
        ("--dynatemp-exp 2", "dynatemp_exponent", 2.0),
        ("--dry-multiplier 0.8", "dry_multiplier", 0.8),
        ("--dry-base 2", "dry_base", 2.0),
        ("--dry-allowed-length 3", "dry_allowed_length", 3),
        ("--dry-penalty-last-n 64", "dry_penalty_last_n", 64),
        ("--mirostat 2", "mirostat", 2),
        ("--mirostat-ent 4", "mirostat_tau", 4.0),
        ("--mirostat-lr 0.2", "mirostat_eta", 0.2),
        ("--samplers top_k;temperature", "samplers", ("top_k", "temperature")),
        ("--samplers kt", "samplers", ("top_k", "temperature")),
        ("--samplers=", "samplers", ()),
        ("--seed 0", "seed", 0),
        ("--seed 18446744073709551615", "seed", 2**64 - 1),
        ("--seed 1 --seed 2", "seed", 2),
        ("-n 5", "max_tokens", 5),
        ("-n=5", "max_tokens", 5),
        ("--n-predict 0", "max_tokens", 0),
        ("--n-predict=-1", "max_tokens", None),
        ("-n -1", "max_tokens", None),
        ("--n-ctx 1", "n_ctx", 1),
        ("--threads 3", "threads", 3),
        ("-t 1", "threads", 1),
        ("--stop END", "stop", ("END",)),
        ("--stop a --stop=b", "stop", ("a", "b")),
        ("--system Short.", "system", "Short."),
        ("--system=", "system", ""),
        ("--precision highest", "precision", "highest"),
        ("--cache-type bf16", "cache_type", "bf16"),
        ("--cache-type=q8_0", "cache_type", "q8_0"),
        ("--prefill-chunk 64", "prefill_chunk", 64),
        ("--device gpu", "device", "gpu"),
        ("--kernels xla", "kernels", "xla"),
        ("--steps-per-dispatch 16", "steps_per_dispatch", 16),
        ("--context-shift", "context_shift", True),
        ("--no-template", "template", False),
        ("--meta", "meta", True),
    ],
)
def test_each_flag_changes_its_field_alone(argv, field, value):
    change = {field: value}
    if field in SAMPLING:
        change = {"sampling": dataclasses.replace(COMMON.sampling, **change)}
    if change.keys() <= IN_COMMON:
        change = {"common": dataclasses.replace(COMMON, **change)}
    assert options(*argv.split()) == dataclasses.replace(DEFAULTS, **change)


@pytest.mark.parametrize(
    ("argv", "model", "prompt"),
    [
        ([], "smollm2", None),
        (["m.gguf"], "m.gguf", None),
        (["gemma3", "hello"], "gemma3", "hello"),
        (["gemma3", "hello", "you all"], "gemma3", "hello you all"),
        (["gemma3", ""], "gemma3", ""),
        (["why is it"], "smollm2", "why is it"),  # a lone argument with a space is a prompt
        (["why", "is it"], "why", "is it"),
        (["gemma3", "--temp", "0", "hello", "-n", "4", "you"], "gemma3", "hello you"),
        (["--meta", "gemma3"], "gemma3", None),  # a switch takes no value
        (["gemma3", "--", "--temp is a flag"], "gemma3", "--temp is a flag"),
        (["gemma3", "caf\udcc3\udca9 \udcff"], "gemma3", "café \ufffd"),  # as Python decodes argv
        (["pypi:a==1/b.gguf", "x"], "pypi:a==1/b.gguf", "x"),
    ],
)
def test_positional_arguments(argv, model, prompt):
    assert model_and_prompt(*argv) == (model, prompt)


def model_and_prompt(*argv: str) -> tuple[str, str | None]:
    common = options(*argv).common
    return common.model, common.prompt


def test_a_lone_file_name_with_a_space_is_a_model(tmp_path):
    path = tmp_path / "my model.gguf"  # not there: still no prompt, but a typing error
    assert model_and_prompt(str(path)) == (str(path), None)
    path = tmp_path / "my model"
    assert model_and_prompt(str(path))[1] == str(path)
    path.write_bytes(b"")
    assert model_and_prompt(str(path)) == (str(path), None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--temperature 1", "there is no flag '--temperature' (did you mean '--temp'?) (--help"),
        ("--sed 1", "'--sed' (did you mean '--seed'?)"),
        ("--sed=1", "there is no flag '--sed' (did you mean '--seed'?) (--help"),
        ("-sed 1", "there is no flag '-sed' (did you mean '--seed'?)"),
        ("m.gguf prompt -x", "there is no flag '-x' (--help"),
        ("--temp", "Missing value for flag --temp"),
        ("--temp hot", "--temp is 'hot', expected a number"),
        ("--temp nan", "--temp must be >= 0 and finite, got nan"),
        ("--temp 1e400", "--temp must be >= 0 and finite, got inf"),
        ("--temp -1", "got -1.0"),
        ("--top-k 1.5", "--top-k is '1.5', expected an integer"),
        ("--top-k -1", "--top-k must be an integer >= 0"),
        ("--top-p nan", "--top-p must be a finite number"),
        ("--min-p inf", "--min-p must be a finite number"),
        ("--repeat-penalty -2", "--repeat-penalty must be >= 0"),
        ("--frequency-penalty x", "--frequency-penalty is 'x'"),
        ("--presence-penalty 1e39", "--presence-penalty must be a finite number"),
        ("--seed -2", "--seed must be an integer from 0 to 2**64 - 1, got -2"),
        ("--seed 18446744073709551616", "--seed must be an integer from 0"),
        ("--repeat-last-n 1025", "--repeat-last-n must be an integer from -1 to 1024"),
        ("--mirostat 1", "--mirostat must be 0 (off) or 2, got 1"),
        ("--samplers xyz", "--samplers has 'z': expected names of penalties, dry, "),
        ("--samplers top_k;top_x", "--samplers has 'top_x': expected names of penalties, dry, "),
        ("--samplers kk", "--samplers has 'top_k' twice"),
        ("-n -2", "--n-predict is -2, expected -1 or more"),
        ("--n-ctx 0", "--n-ctx is 0, expected 1 or more"),
        ("-t 0", "--threads is 0, expected 1 or more"),
        ("--prefill-chunk 0", "--prefill-chunk is 0, expected 1 or more"),
        ("--keep -2 --context-shift", "--keep is -2, expected -1 or more"),
        ("--keep 4", "--keep needs --context-shift"),
        ("--cache-type f64", "expected one of f32, f16, bf16, q8_0"),
        ("--device cuda", "expected one of auto, cpu, gpu, metal"),
        ("--kernels triton", "expected one of auto, xla, pallas"),
        ("--steps-per-dispatch 0", "--steps-per-dispatch is 0, expected 1 to 16"),
        ("--steps-per-dispatch 17", "--steps-per-dispatch is 17, expected 1 to 16"),
        ("--precision low", "expected one of highest, default"),
        ("--greedy=maybe", "--greedy is 'maybe', expected true or false"),
        ("--config cod", "--config: there is no preset 'cod' (did you mean 'code'?)"),
        ("--config /no/such.toml", "--config: /no/such.toml: No such file"),
        ("-f /no/such.txt", "the prompt file '/no/such.txt' does not exist"),
        ("-f x.txt m.gguf hello", "there are two prompts: give --file or words, not both"),
        ("--cnv --no-template", "--cnv takes no value, and needs the chat template"),
        ("--cnv=true", "--cnv takes no value"),
        ("--no-template --system x", "--system needs the chat template"),
        ("--flagfile=/no/such/file", "there is no flag '--flagfile'"),
        (f"-n {'9' * 5000}", "--n-predict is '9999"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(argv, message):
    with pytest.raises(UsageError) as caught:
        options(*argv.split())
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def rows(text: str) -> dict[str, str]:
    """The line of each flag, by its long name."""
    found = [line for line in text.splitlines() if line.startswith("  -")]
    matches = [re.match(r"  (?:-\w+, )?(--[a-z-]+) +\S", line) for line in found]
    names = [match[1] for match in matches if match]
    assert len(set(names)) == len(names) == len(found)
    return dict(zip(names, found, strict=True))


def test_help_fits_a_terminal():
    lines = help_text().splitlines()
    assert lines[0] == "usage: python -m minfer_jax.generate [flags] [MODEL] [PROMPT]"
    assert len(lines) <= 40
    for text in (help_text(), help_all()):
        assert max(map(len, text.splitlines())) <= 80
        assert all(name in text for name in sources.ALIASES)
        assert text.count("python -m") >= 4, "examples"


def test_help_names_every_flag():
    assert rows(help_all()).keys() == {f"--{flag.name}" for flag in FLAGS}
    short = {f"--{flag.name}" for flag in FLAGS if flag.main}
    assert rows(help_text()).keys() == short | {"--help-all"}
    assert {"--temp", "--n-predict", "--file", "--config", "--n-ctx"} <= short
    for name in presets.names():
        assert name in help_text()
        assert f"\n  {name.ljust(20)}{presets.load(name).about}\n" in help_all()


def test_help_all_names_the_steps_of_the_sampler():
    text = " ".join(help_all().split())
    assert all(f"{letter} {name}" in text for letter, name in LETTERS.items())


def test_help_shows_short_names_and_defaults():
    found = rows(help_all())
    for flag, field in (("temp", "temperature"), ("top-k", "top_k"), ("seed", "seed")):
        assert found[f"--{flag}"].endswith(f"[{getattr(COMMON.sampling, field)}]")
    for name, start, default in (
        ("--n-predict", "-n, ", "[512]"),
        ("--n-ctx", "", "[4096]"),
        ("--prefill-chunk", "", "[512]"),
        ("--threads", "-t, ", ""),
        ("--file", "-f, ", ""),
    ):
        assert found[name].startswith(f"  {start}{name} ")
        assert found[name].endswith(default)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("smollm2 --cnv --temp 0 Hello.", "smollm2 --temp 0 Hello."),
        ("-cnv -st --session x.json", "-st --session x.json"),
        ("--cnv m.gguf -- --cnv", "m.gguf -- --cnv"),
        ("m.gguf -- --cnv", None),
        ("m.gguf hello", None),
        ("m.gguf --cnv --no-template", None),
        ("m.gguf --nocnv", None),
    ],
)
def test_a_conversation_is_left_to_chat(argv, expected):
    found = conversation(["generate", *argv.split()])
    assert found == (None if expected is None else ["generate", *expected.split()])


# Presets, seeds and prompts from files


def test_a_preset_goes_before_defaults_and_behind_flags(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[load]\nn_ctx = 100\ncache_type = 'q8_0'\nprecision = 'highest'\n"
        "[generate]\ntemperature = 2\ntop_k = 7\nmax_tokens = 9\nstop = ['a', 'b']\n"
        "system = 'Brief.'\ncontext_shift = true\nn_keep = 3\nseed = 5\n"
        "samplers = ['min_p', 'temperature']\nmirostat_tau = 4\n"
    )
    found = options("--config", str(path))
    steps = ("min_p", "temperature")
    sampling = SamplingParams(temperature=2.0, top_k=7, seed=5, samplers=steps, mirostat_tau=4.0)
    common = dataclasses.replace(
        COMMON,
        sampling=sampling,
        max_tokens=9,
        stop=("a", "b"),
        system="Brief.",
        n_ctx=100,
        cache_type="q8_0",
        precision="highest",
    )
    assert found == dataclasses.replace(DEFAULTS, common=common, context_shift=True, keep=3)
    words = "--top-k 0 -n 512 --stop c --n-ctx 50 --keep 0 --nocontext-shift --seed 42"
    words += " --samplers edskypmxt --mirostat-ent 5"
    for argv in ([*words.split(), "--config", str(path)], ["--config", str(path), *words.split()]):
        over = options(*argv)
        assert over.common.sampling == SamplingParams(temperature=2.0, top_k=0)
        assert (over.common.max_tokens, over.common.stop, over.common.n_ctx) == (512, ("c",), 50)
        assert (over.keep, over.context_shift) == (0, False)
        assert over.common.precision == "highest"
    assert options("--config", str(path), "--greedy").common.sampling.temperature == 0


@pytest.mark.parametrize("name", presets.names())
def test_every_shipped_preset_is_taken(name):
    found, preset = options("--config", name).common, presets.load(name)
    expected = {k: v for k, v in preset.generate.items() if k in SAMPLING}
    assert found.sampling == SamplingParams(**expected)
    assert found.max_tokens == preset.generate.get("max_tokens", 512)
    for key, value in preset.load.items():
        assert getattr(found, key) == value


def test_a_seed_that_is_drawn():
    found = [options("--seed", "-1").common for _ in range(3)]
    assert all(o.seed_drawn and 0 <= o.sampling.seed < 2**32 for o in found)
    assert len({o.sampling.seed for o in found}) == 3
    assert not options("--seed", "0").common.seed_drawn


def test_a_prompt_from_a_file(tmp_path):
    path = tmp_path / "ask.txt"
    path.write_bytes(b"\xef\xbb\xbfWhy is\r\nthe sky blue?\r\n")
    for argv in (["-f", str(path)], ["--file", str(path), "gemma3"]):
        assert options(*argv).common.prompt == "Why is\nthe sky blue?"
    assert options("gemma3", "-f", str(path)).common.model == "gemma3"
    assert options("-f", "-").common == COMMON, "it is read later"


def test_text_in_flags_is_utf_8_in_any_locale():
    """As Python decodes arguments that its locale has no characters for."""
    found = options("--system", "caf\udcc3\udca9", "--stop", "\udce2\udc82\udcac\udcff").common
    assert (found.system, found.stop) == ("café", ("\u20ac\ufffd",))


def test_how_much_a_shift_keeps():
    assert options("--context-shift", "--keep", "5").keep == 5
    assert options("--keep=-1", "--context-shift").keep == -1


@pytest.mark.parametrize("word", ["-5 + 3 = ?", "- one", "--- two"])
def test_a_prompt_that_begins_with_a_dash(word):
    with pytest.raises(UsageError, match=f"no flag '{re.escape(word.split('=')[0])}', and words"):
        options("m.gguf", word)
    assert options("m.gguf", "--", word).common.prompt == word


@pytest.mark.parametrize("word", ["--flagfile=/etc/passwd", "--undefok=bogus"])
def test_the_flag_library_s_own_flags_are_refused(word):
    with pytest.raises(UsageError, match="there is no flag"):
        parse(["generate", word])
