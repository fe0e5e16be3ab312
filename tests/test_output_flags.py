"""Flags of `generate` for what an answer must be like, and what is told of it: read and refused."""

import math

import pytest

from minfer_jax.constraint import Constraint
from minfer_jax.generate_flags import Options, parse
from minfer_jax.usage import UsageError

SCHEMA = '{"type": "integer"}'


def options(*argv: str) -> Options:
    return parse(["generate", *argv])


def extra(*argv: str) -> dict:
    return dict(options(*argv).extra)


def test_what_is_not_given_is_not_said():
    assert extra() == {}
    assert (options().logprobs, options().samples) == (None, 1)


def test_numbers_of_answers_and_tokens():
    assert options("--samples", "16").samples == 16
    assert options("--logprobs", "0").logprobs == 0
    assert options("--logprobs=20").logprobs == 20


def test_drafts():
    assert extra("--draft-ngram") == {"draft_ngram": True}
    assert extra("--draft-ngram", "--draft-max", "3") == {"draft_ngram": 3}
    found = options("--draft", "small.gguf", "--draft-max", "15")
    assert (found.draft, found.draft_max, dict(found.extra)) == ("small.gguf", 15, {})


def test_biases():
    assert extra("--ignore-eos") == {"ignore_eos": True}
    words = ["--logit-bias", "15043+1.5", "--logit-bias", "7-inf", "--logit-bias=0-2e1"]
    assert extra(*words) == {"logit_bias": {15043: 1.5, 7: -math.inf, 0: -20.0}}
    assert extra(*words, "--logit-bias", "7+0") == {"logit_bias": {15043: 1.5, 7: 0.0, 0: -20.0}}


def test_breakers():
    flag = "--dry-sequence-breaker"
    assert extra(flag, "a", flag, "\udcc3\udca9") == {"dry_breakers": ("a", "é")}
    assert extra(flag, "none") == {"dry_breakers": ()}
    assert extra(flag, "none", flag, "x") == {"dry_breakers": ("none", "x")}


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("json-schema", SCHEMA, Constraint.from_json_schema(SCHEMA)),
        ("regex", "@[a-z]+", Constraint.from_regex("@[a-z]+")),
        ("grammar", 'root ::= "x"', Constraint.from_grammar('root ::= "x"')),
        ("grammar", 'start: "x"', Constraint.from_grammar('start: "x"')),
    ],
)
def test_constraints(tmp_path, flag, text, expected):
    assert extra(f"--{flag}", text) == {"constraint": expected}
    path = tmp_path / "it.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    if flag != "regex":
        assert extra(f"--{flag}", f"@{path}") == {"constraint": expected}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--samples", "17"], "--samples is 17, expected 16 at most"),
        (["--samples", "0"], "--samples is 0, expected 1 or more"),
        (["--logprobs", "21"], "--logprobs is 21, expected 20 at most"),
        (["--logprobs", "-1"], "--logprobs is -1, expected 0 or more"),
        (["--samples", "2", "--logprobs", "0"], "side by side: leave out --logprobs"),
        (["--samples", "2", "--context-shift"], "side by side: leave out --context-shift"),
        (["--samples", "2", "--draft-ngram"], "side by side: leave out --draft-ngram"),
        (["--samples", "2", "--draft", "x"], "side by side: leave out --draft"),
        (["--draft-ngram", "--draft", "x"], "--draft-ngram and --draft: give one of them"),
        (["--draft-max", "3"], "--draft-max needs --draft-ngram or --draft"),
        (["--draft-ngram", "--draft-max", "16"], "--draft-max is 16, expected 15 at most"),
        (["--draft-ngram", "--draft-max", "0"], "--draft-max is 0, expected 1 or more"),
        (["--logit-bias", "7"], "--logit-bias is '7', expected a token's id and a number"),
        (["--logit-bias", "7+inf"], "--logit-bias is '7+inf', expected"),
        (["--logit-bias", "-7+1"], "--logit-bias is '-7+1', expected"),
        (["--logit-bias", "7+nan"], "--logit-bias is '7+nan', expected"),
        (["--logit-bias", f"{'7' * 5000}+1"], "--logit-bias is '7777"),
        (["--json-schema", "{"], "--json-schema is no JSON schema: Expecting property name"),
        (["--json-schema", '{"type": 3}'], "--json-schema is no JSON schema: "),
        (["--json-schema", "[" * 100_000], "--json-schema is no JSON schema: "),
        (["--regex", "("], "--regex is no regex: unclosed group"),
        (["--grammar", "root ::= other"], "--grammar is no grammar: "),
        (
            ["--grammar", "@/dev/null/x"],
            "'/dev/null/x' cannot be read: Not a directory",
        ),
        (["--json-schema", "@/tmp"], "the file of --json-schema '/tmp' is a folder"),
        (["--regex", "a", "--grammar", "x"], "--regex and --grammar: give one of them"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(argv, message):
    with pytest.raises(UsageError) as caught:
        options(*argv)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
