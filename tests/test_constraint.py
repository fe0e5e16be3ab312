"""Constraints: what they refuse, what they let through, and that what a model writes under them
fits, whatever it would have written.

The models are tiny and write at random, so nothing fits but by the constraint.
"""

import itertools
import json
import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minfer_jax.constraint import MOST_GRAMMAR, MOST_TEXT, Constraint, ConstraintError, Vocabulary
from minfer_jax.language_model import load
from minfer_jax.tokenizer import Tokenizer, TokenizerError
from tests.helpers import tiny_models, vocabs

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
GBNF = r"""
# a sum
root ::= number (" + " number)* "\n"
number ::= [1-9] [0-9]{0,2}
"""
LARK = r"""
start: "<" NAME ">"
NAME: /[a-z]{1,5}/
"""
WILD: dict[str, Any] = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value)[:3] == ["name", "n", "tags"]
    assert set(value) <= set(SCHEMA["properties"])
    assert len(value["name"]) <= 4
    assert type(value["n"]) is int
    assert 0 <= value["n"] <= 99
    assert len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"a", "b"}
    return type(value.get("ok", True)) is bool


# name -> (constraint, whether a text fits)
CASES = {
    "json": (Constraint.from_json_schema(SCHEMA), fits_schema),
    "regex": (
        Constraint.from_regex("(ja|nein)[!?]{1,3}"),
        re.compile("(ja|nein)[!?]{1,3}").fullmatch,
    ),
    "gbnf": (
        Constraint.from_grammar(GBNF),
        re.compile(r"[1-9][0-9]{0,2}( \+ [1-9][0-9]{0,2})*\n").fullmatch,
    ),
    "lark": (Constraint.from_grammar(LARK), re.compile("<[a-z]{1,5}>").fullmatch),
    "text": (Constraint.from_regex("[é漢🙂]{2,4}"), re.compile("[é漢🙂]{2,4}").fullmatch),
}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A model with byte pairs: of 268 tokens 3 are control tokens, of which 2 end an answer."""
    file = tiny_models.save(
        tmp_path_factory.mktemp("bpe"), tiny_models.tiny_text_model(n_layer=1, n_ctx=256)
    )
    return load(file.path, n_ctx=256, precision="highest")


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """One with SentencePiece, and rows of logits that no token has."""
    metadata = vocabs.tiny_spm()
    n_vocab = len(metadata["tokenizer.ggml.tokens"]) + 13
    data = tiny_models.tiny_model("llama", n_layer=1, n_ctx=256, n_vocab=n_vocab, metadata=metadata)
    file = tiny_models.save(tmp_path_factory.mktemp("spm"), data)
    return load(file.path, n_ctx=256, precision="highest")


@pytest.fixture(scope="module", params=["bpe", "spm"])
def model(request):
    return request.getfixturevalue(request.param)


# What is written fits


@settings(
    max_examples=5, deadline=None, suppress_health_check=(HealthCheck.function_scoped_fixture,)
)
@given(seed=st.integers(0, 2**64 - 1), wild=st.booleans())
@pytest.mark.parametrize("name", CASES)
def test_whatever_ends_fits(model, name, seed, wild):
    constraint, fits = CASES[name]
    options = {**(WILD if wild else {}), "constraint": constraint, "seed": seed}
    text = model.generate("hello", max_tokens=100, **options)
    if model.stats.finish_reason == "stop":
        assert fits(text), text
    else:
        assert model.stats.n_generated == 100
    assert [c.name for c in model.engine.compiles][1:] == ["decode extended"]


def test_most_answers_end(model):
    """And not at max_tokens: white space between the parts of JSON is bounded."""
    ends = []
    for seed in range(20):
        model.generate("hello", max_tokens=200, constraint=CASES["json"][0], seed=seed, **WILD)
        ends.append(model.stats.finish_reason == "stop")
    assert sum(ends) > 10


def test_an_answer_that_is_cut_is_the_beginning_of_one(bpe):
    options = {"constraint": CASES["json"][0], "seed": 1, **WILD}
    whole = bpe.generate("hello", max_tokens=200, **options)
    cut = bpe.generate("hello", max_tokens=9, **options)
    assert bpe.stats.finish_reason == "length"
    assert whole.startswith(cut)
    assert cut + "".join(bpe.continue_stream(max_tokens=191)) == whole


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_may_end_where_it_is_complete(bpe, ignore_eos):
    """It need not: there, the model decides, or what forbids the tokens that end an answer."""
    constraint = Constraint.from_regex("[ab]{3,6}")
    options = {"constraint": constraint, "logit_bias": {"<|im_end|>": 1e6}, "temperature": 0.0}
    text = bpe.generate("hello", ignore_eos=ignore_eos, **options)
    assert re.fullmatch("[ab]{6}" if ignore_eos else "[ab]{3}", text)
    assert bpe.stats.finish_reason == "stop"


def test_any_json(bpe):
    texts = [
        bpe.generate("hello", constraint=Constraint.from_json_schema(True), seed=seed, **WILD)
        for seed in range(5)
    ]
    assert len(set(texts)) > 1
    numbers = Constraint.from_json_schema('{"type": "integer", "maximum": 5, "minimum": 0}')
    assert int(bpe.generate("hello", constraint=numbers)) <= 5


def test_options_of_a_schema_are_llguidance_s(bpe):
    schema = {"const": {"a": [1]}, "x-guidance": {"whitespace_flexible": False}}
    assert bpe.generate("hello", constraint=Constraint.from_json_schema(schema)) == '{"a":[1]}'


def test_a_special_token_is_written_only_where_the_grammar_names_it(bpe):
    free = Constraint.from_regex("(?s:.)*")
    list(bpe.stream("hello", constraint=free, max_tokens=100, ignore_eos=True, **WILD))
    assert not {0, 1, 2} & set(bpe.engine.tokens[bpe.stats.n_prompt :])
    named = Constraint.from_grammar('start: "a" <|im_start|> "b"')
    assert bpe.generate("hello", constraint=named) == "ab"
    assert bpe.engine.tokens[-2] == 1


def test_constraints_are_values(bpe):
    one = CASES["json"][0]
    assert one == Constraint.from_json_schema(json.dumps(SCHEMA))
    options = {"constraint": one, "seed": 5, "max_tokens": 60, **WILD}
    text = bpe.generate("hello", **options)
    for _ in itertools.islice(bpe.stream("hello", **options), 2):
        pass
    assert bpe.generate("hello", **options) == text, "the run before has not moved it"


# Matchers


def allowed(matcher) -> set[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_the_mask_is_one_bit_a_token():
    tokenizer = Tokenizer.from_metadata(vocabs.tiny_bpe())
    matcher = Vocabulary(tokenizer, tokenizer.n_vocab + 40).matcher(
        Constraint.from_regex("(hello|help)")
    )
    mask = matcher.mask()
    assert (mask.dtype, mask.shape) == (np.uint32, (-(-(tokenizer.n_vocab + 40) // 32),))
    pieces = {tokenizer.tokens[i] for i in allowed(matcher)}
    assert pieces == {"h", "he", "hell", "hello"}
    matcher.accept(tokenizer.tokens.index("hello"))
    assert allowed(matcher) == tokenizer.eog_ids
    assert matcher.finished


def test_ends_are_allowed_exactly_where_the_text_is_complete():
    tokenizer = Tokenizer.from_metadata(vocabs.tiny_bpe())
    matcher = Vocabulary(tokenizer, tokenizer.n_vocab).matcher(Constraint.from_regex("l{2,4}"))
    letter, ends = tokenizer.tokens.index("l"), tokenizer.eog_ids
    for n, complete in enumerate([False, False, True, True, True]):
        assert (ends <= allowed(matcher), ends & allowed(matcher)) == (
            complete,
            ends if complete else set(),
        )
        assert matcher.finished == (n == 4)
        if n < 4:
            matcher.accept(letter)


def test_a_copy_goes_its_own_way():
    tokenizer = Tokenizer.from_metadata(vocabs.tiny_bpe())
    matcher = Vocabulary(tokenizer, tokenizer.n_vocab).matcher(Constraint.from_regex("l(l|e)"))
    first, other = (tokenizer.tokens.index(c) for c in "le")
    matcher.accept(first)
    copy = matcher.copy()
    copy.accept(other)
    assert copy.finished
    assert not matcher.finished
    assert {first, other} <= allowed(matcher)
    with pytest.raises(ConstraintError, match="the constraint: "):
        copy.accept(first)
    matcher.accept(first)
    assert matcher.finished


def test_a_dead_end_is_an_error():
    """A vocabulary of a few letters cannot write a digit."""
    metadata = vocabs.tiny_bpe(
        tokens=["<|begin|>", "<|end_of_text|>", "a", "b"],
        token_type=np.array([3, 3, 1, 1], np.int32),
        merges=["a b"],
    )
    vocabulary = Vocabulary(Tokenizer.from_metadata(metadata), 4)
    matcher = vocabulary.matcher(Constraint.from_regex("aa1"))
    matcher.accept(2)
    with pytest.raises(ConstraintError, match="the constraint: ") as caught:
        matcher.accept(2)
        matcher.mask()
    assert str(caught.value).isprintable()
    matcher = vocabulary.matcher(Constraint.from_regex("aaa"))
    for _ in range(3):
        assert allowed(matcher) == {2}
        matcher.accept(2)
    assert matcher.finished


def test_a_model_whose_answers_do_not_end():
    tokenizer = Tokenizer.from_metadata(
        vocabs.tiny_bpe(eos_token_id=None, tokens=["a", "b"], token_type=None, merges=["a b"])
    )
    with pytest.raises(ConstraintError, match="no token that ends an answer"):
        Vocabulary(tokenizer, 2)


# What is refused


def refused(make, *args: Any) -> str:
    begin = time.perf_counter()
    with pytest.raises(ConstraintError) as caught:
        make(*args)
    assert time.perf_counter() - begin < 5
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    return message


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": "objekt"}', "JSON schema: Invalid type: objekt"),
        ('{"a": 1', "JSON schema: Expecting ',' delimiter"),
        ("[1]", "JSON schema: schema must be an object or boolean"),
        ({"$ref": "#/nope"}, "JSON schema: Pointer '/nope' does not exist"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable schema"),
        (False, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "("}, "regex parse error: ( error: unclosed group"),
        ({"type": {1, 2}}, "not JSON serializable"),
        ("[" * 100_000, "JSON schema: maximum recursion depth"),
        ('"' + "x" * MOST_TEXT + '"', f"characters, at most {MOST_TEXT} do"),
        ('{"const": "\ud800"}', r"it has '\ud800', which is no character"),
    ],
)
def test_bad_schemas(schema, message):
    found = refused(Constraint.from_json_schema, schema)
    assert message in found
    assert found.count("JSON schema: ") == 1


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("(", "regex: unclosed group"),
        ("a{2,1}", "regex: invalid repetition count range"),
        ("[z-a]", "invalid character class range"),
        ("(?=a)b", "look-around"),
        ("x" * (MOST_TEXT + 1), f"at most {MOST_TEXT} do"),
        (None, "it is NoneType, expected text"),
        ("a\udcffb", r"it has '\udcff', which is no character"),
    ],
)
def test_bad_regexes(regex, message):
    found = refused(Constraint.from_regex, regex)
    assert found.startswith("regex: ")
    assert message in found


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "No 'root' rule found"),
        ("hello", "Expected ::="),
        ('root ::= "a" b', "Rule 'b' not found"),
        ('root ::= "a\\', "string index out of range"),
        ("root ::= " + "(" * 100_000, "recursion"),
        ("start: foo", 'unknown name: "foo"'),
        ("start: " + "a" * MOST_GRAMMAR, f"at most {MOST_GRAMMAR} do"),
        ('{"grammars": []}', ""),
        ("{", ""),
    ],
)
def test_bad_grammars(grammar, message):
    found = refused(Constraint.from_grammar, grammar)
    assert found.startswith("grammar: ")
    assert message in found


NOTHING_CAN = "the constraint: no token of the vocabulary can go on from here"


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.from_grammar('root ::= root "a"'), NOTHING_CAN),
        (Constraint.from_json_schema({"$ref": "#"}), NOTHING_CAN),
        (Constraint.from_regex("[a&&b]"), NOTHING_CAN),
        (
            Constraint.from_grammar("start: " + '"x"? ' * 52_000),
            "the constraint: it is too much for llguidance: assertion failed",
        ),
    ],
)
def test_what_nothing_meets(bpe, constraint, message):
    with pytest.raises(ConstraintError, match=re.escape(message)) as caught:
        bpe.generate("hello", constraint=constraint, max_tokens=3)
    assert "unknown" not in str(caught.value)
    assert "verbose" not in str(caught.value)


@pytest.mark.parametrize("regex", ["((a{1000}){1000}){1000}", "(.*a){300}.*b", "(a|aa|b){90000}"])
def test_what_takes_too_much_ends(bpe, regex):
    """It is refused, or found to be cheap: never a hang."""
    begin = time.perf_counter()
    try:
        constraint = Constraint.from_regex(regex)
        bpe.generate("hello", constraint=constraint, max_tokens=3)
    except ConstraintError as e:
        assert str(e).isprintable()
    assert time.perf_counter() - begin < 60


# Options in words


def test_a_bias_by_text(bpe):
    assert bpe.generate("x", logit_bias={" world": 1e6}, max_tokens=2) == " world world"
    with pytest.raises(TokenizerError, match="'hello hello', which is 3 tokens, expected one"):
        bpe.generate("x", logit_bias={"hello hello": 1.0})
    with pytest.raises(TokenizerError, match="'', which is 0 tokens"):
        bpe.generate("x", logit_bias={"": 1.0})


def test_a_bias_by_text_has_no_space_in_front(spm):
    assert spm.generate("x", logit_bias={"hello": 1e6}, max_tokens=2) == "hellohello"


def test_ends_can_be_ignored(bpe):
    options = {"logit_bias": {"<|im_end|>": 1e6}, "max_tokens": 5}
    assert bpe.generate("x", **options) == ""
    list(bpe.stream("x", ignore_eos=True, **options))
    assert (bpe.stats.n_generated, bpe.stats.finish_reason) == (5, "length")


def test_dry_knows_the_text_of_tokens(bpe):
    """After a breaker there is no repetition to go on with."""
    options = {"dry_multiplier": 1e6, "dry_allowed_length": 1, "temperature": 0.0, "max_tokens": 60}
    options["logit_bias"] = {"a": 1e3, "b": 1e3}  # so that it repeats itself
    plain = bpe.generate("x", **{**options, "dry_multiplier": 0.0})
    text = bpe.generate("x", **options)
    assert text != plain
    assert bpe.generate("x", dry_breakers=tuple(set(plain)), **options) == plain


def test_what_fills_up_the_vocabulary_is_not_known():
    kinds = np.array([3, 3, 5, 1, 5, 5], np.int32)
    metadata = vocabs.tiny_bpe(
        tokens=["<s>", "</s>", "u", "a", "p", "q"], token_type=kinds, merges=["a a"]
    )
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.n_vocab, tokenizer.n_known) == (6, 4)


def test_tokens_beyond_the_rows_do_no_harm(tmp_path):
    """A file with more tokens than rows of logits; one that would end an answer is among them."""
    metadata = vocabs.tiny_spm(eot_token_id=285)
    data = tiny_models.tiny_model("llama", n_vocab=280, n_layer=1, n_ctx=64, metadata=metadata)
    model = load(tiny_models.save(tmp_path, data).path, n_ctx=64, precision="highest")
    assert model.tokenizer is not None
    assert model.tokenizer.eog_ids == {2, 285}
    options: dict[str, Any] = {"dry_multiplier": 1.0, "dry_breakers": "he", "max_tokens": 8}
    list(model.stream("he", ignore_eos=True, **options))
    assert model.stats.n_generated == 8
    assert model.generate("he", constraint=Constraint.from_regex("h{3}"), max_tokens=8) == "hhh"


def test_rows_beyond_the_tokens_are_never_drawn(spm):
    assert spm.cfg.n_vocab == spm.tokenizer.n_known + 13
    list(spm.stream("hello", max_tokens=200, ignore_eos=True, **WILD))
    list(spm.generate_tokens([5], 200, **WILD))
    assert max(spm.engine.tokens) < spm.tokenizer.n_known
