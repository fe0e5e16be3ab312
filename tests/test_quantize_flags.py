"""The command line of `quantize`: what each flag comes to, and how wrong ones are refused."""

import dataclasses

import pytest

from minfer_jax.quant.quantizers import QUANTIZERS
from minfer_jax.quantize_flags import Options, help_text, parse
from minfer_jax.quantize_mix import MIXES
from minfer_jax.usage import UsageError

DEFAULTS = Options(
    model="in.gguf",
    out="out.gguf",
    mix="Q4_K_M",
    output_type=None,
    embedding_type=None,
    pure=False,
    force=False,
    threads=None,
)


def options(*argv: str) -> Options:
    return parse(["quantize", *argv])


def test_without_flags():
    assert options("in.gguf", "out.gguf", "Q4_K_M") == DEFAULTS


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--output-type Q8_0", "output_type", "Q8_0"),
        ("--output-type=iq4_nl", "output_type", "IQ4_NL"),
        ("--embedding-type bf16", "embedding_type", "BF16"),
        ("--pure", "pure", True),
        ("--force", "force", True),
        ("--dry-run", "out", None),
        ("--threads 3", "threads", 3),
        ("-t 1", "threads", 1),
    ],
)
def test_each_flag_changes_its_field_alone(argv: str, field: str, value: object):
    expected = dataclasses.replace(DEFAULTS, **{field: value})
    assert options(*argv.split(), "in.gguf", "out.gguf", "Q4_K_M") == expected
    assert options("in.gguf", "out.gguf", *argv.split(), "Q4_K_M") == expected


@pytest.mark.parametrize(
    ("word", "mix"),
    [
        ("q4_k_m", "Q4_K_M"),
        ("Q4_K", "Q4_K_M"),
        ("q5_k", "Q5_K_M"),
        ("Q3_K", "Q3_K_M"),
        ("f16", "F16"),
    ],
)
def test_names_of_mixes(word: str, mix: str):
    assert options("in.gguf", "out.gguf", word) == dataclasses.replace(DEFAULTS, mix=mix)


def test_a_dry_run_needs_no_name():
    assert options("--dry-run", "in.gguf", "Q4_K_M") == dataclasses.replace(DEFAULTS, out=None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "0 arguments, expected 3: IN OUT TYPE"),
        ("in.gguf Q4_K_M", "2 arguments, expected 3"),
        ("in.gguf out.gguf Q4_K_M 8", "4 arguments, expected 3"),
        ("in.gguf out.gguf Q4", "TYPE is 'Q4', expected one of F32, F16"),
        ("in.gguf out.gguf IQ2_XS", "TYPE is 'IQ2_XS'"),
        (
            "in.gguf out.gguf Q8_0 --output-type Q4_K_M",
            "--output-type is 'Q4_K_M' (did you mean 'Q4_K'?), expected one of",
        ),
        ("in.gguf out.gguf Q8_0 --embedding-type=", "--embedding-type is ''"),
        ("in.gguf out.gguf Q8_0 -t 0", "--threads is 0, expected 1 or more"),
        ("in.gguf out.gguf Q8_0 -t many", "--threads"),
        ("in.gguf out.gguf Q8_0 --threads", "threads"),
        ("in.gguf out.gguf Q8_0 --imatrix x", "there is no flag '--imatrix'"),
        ("in.gguf out.gguf Q8_0 --flagfile=x", "there is no flag '--flagfile'"),
    ],
)
def test_wrong_usage(argv: str, message: str):
    with pytest.raises(UsageError) as caught:
        options(*argv.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_tells_of_every_flag_and_type():
    text = help_text()
    for word in (
        "--output-type",
        "--embedding-type",
        "--pure",
        "--force",
        "--dry-run",
        "--threads",
    ):
        assert word in text
    assert all(f" {mix}" in text for mix in MIXES)
    assert {mix.most for mix in MIXES.values()} <= QUANTIZERS.keys()
    assert max(map(len, text.splitlines())) <= 80
