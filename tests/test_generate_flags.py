"""The command line of `generate`: what each flag comes to, and how wrong ones are refused."""

import dataclasses

import pytest

from minfer_jax import sources
from minfer_jax.generate_flags import Options, help_text, parse
from minfer_jax.model_flags import ModelOptions
from minfer_jax.sampling import SamplingParams
from minfer_jax.usage import UsageError

COMMON = ModelOptions(
    model=sources.DEFAULT_MODEL,
    prompt=None,
    system=None,
    sampling=SamplingParams(),
    max_tokens=512,
    stop=(),
    n_ctx=4096,
    precision="default",
    cache_type=None,
    prefill_chunk=512,
    threads=None,
    meta=False,
)
DEFAULTS = Options(common=COMMON, template=None, context_shift=False, keep=0)
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
        ("--temperature 1", "Unknown command line flag 'temperature'"),
        ("--sed 1", "'sed'. Did you mean: seed"),
        ("m.gguf prompt -x", "Unknown command line flag 'x'"),
        ("--temp", "Missing value for flag --temp"),
        ("--temp hot", "--temp=hot"),
        ("--temp nan", "temperature must be >= 0 and finite, got nan"),
        ("--temp 1e400", "temperature must be >= 0 and finite, got inf"),
        ("--temp -1", "got -1.0"),
        ("--top-k 1.5", "--top-k=1.5"),
        ("--top-k -1", "top_k must be an integer >= 0"),
        ("--top-p nan", "top_p must be a finite number"),
        ("--min-p inf", "min_p must be a finite number"),
        ("--repeat-penalty -2", "repeat_penalty must be >= 0"),
        ("--frequency-penalty x", "--frequency-penalty=x"),
        ("--presence-penalty 1e39", "presence_penalty must be a finite number"),
        ("--seed -1", "seed must be an integer from 0 to 2**64 - 1, got -1"),
        ("--seed 18446744073709551616", "seed must be an integer from 0"),
        ("-n -2", "--n-predict is -2, expected -1 or more"),
        ("--n-ctx 0", "--n-ctx is 0, expected 1 or more"),
        ("-t 0", "--threads is 0, expected 1 or more"),
        ("--prefill-chunk 0", "--prefill-chunk is 0, expected 1 or more"),
        ("--keep -2 --context-shift", "--keep is -2, expected -1 or more"),
        ("--keep 4", "--keep needs --context-shift"),
        ("--cache-type f64", "value should be one of <f32|f16|bf16|q8_0>"),
        ("--precision low", "value should be one of <highest|default>"),
        ("--greedy=maybe", "--greedy=maybe"),
        ("--no-template --system x", "--system needs the chat template"),
        ("--flagfile=/no/such/file", "/no/such/file"),
        (f"-n {'9' * 5000}", "--n-predict=9999"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(argv, message):
    with pytest.raises(UsageError) as caught:
        options(*argv.split())
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_help_fits_a_terminal_and_names_every_flag():
    lines = help_text().splitlines()
    assert lines[0] == "usage: python -m minfer_jax.generate [flags] [MODEL] [PROMPT]"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    flags = (
        "--temp --top-k --top-p --min-p --repeat-penalty --frequency-penalty --presence-penalty "
        "--seed --n-predict --n-ctx --threads --stop --system --precision --greedy --no-template "
        "--meta --cache-type --prefill-chunk --context-shift --keep"
    ).split()
    for flag in flags:
        rows = [line for line in lines if f"{flag} " in line[:22]]
        assert len(rows) == 1, flag
        assert rows[0][22:].strip(), "what it does"
    assert len([line for line in lines if line.startswith("  -")]) == len(flags)
    assert "-n, --n-predict" in help_text()
    assert "-t, --threads" in help_text()
    for name in sources.ALIASES:
        assert name in help_text()


def test_help_shows_the_defaults():
    rows = {line[:22].split()[-1]: line for line in help_text().splitlines() if line[:3] == "  -"}
    for flag, field in (("temp", "temperature"), ("top-k", "top_k"), ("seed", "seed")):
        assert rows[f"--{flag}"].endswith(f"[{getattr(COMMON.sampling, field)}]")
    assert rows["--n-predict"].endswith("[512]")
    assert rows["--n-ctx"].endswith("[4096]")
    assert rows["--prefill-chunk"].endswith("[512]")


def test_how_much_a_shift_keeps():
    assert options("--context-shift", "--keep", "5").keep == 5
    assert options("--keep=-1", "--context-shift").keep == -1


@pytest.mark.parametrize("word", ["--flagfile=/etc/passwd", "--undefok=bogus"])
def test_the_flag_library_s_own_flags_are_refused(word):
    with pytest.raises(UsageError, match="Unknown command line flag"):
        parse(["generate", word])
