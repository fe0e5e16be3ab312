"""How text is cut before merging."""

import string
import time

import pytest
from tokenizers import pre_tokenizers

from minfer_jax.bpe import CHARACTER_BYTES
from minfer_jax.pretokenizer import PRE_TOKENIZERS, cutter

# Contractions, digits, cases beyond ASCII, combining marks, line breaks, scripts without spaces,
# punctuation, symbols, white space beyond ASCII, numbers that are no digits, a letter that
# Unicode 15.1 does not know, a control character, white space at the end.
TEXT = (
    "I'VE it's 1234567 \xc9coleABC\xe91DE's a\u0301\u0915\u093e\r\n\n  漢字カナ한글ไท!?(x.y)/"
    "\n\t<b>$+  «\u01c5»\u3000²½\U0001f600\u1c89 \x01,end  "
)

# Lengths of the pieces, 0-9 then a-z then A-Z, to the names of those that cut so: what llama.cpp's
# `unicode_regex_split` (b11434) makes of TEXT with the expressions that it has for each name.
LENGTHS = string.digits + string.ascii_letters
CUTS = {
    "1123111331a121121114931112211321111222132": "default falcon",
    "13321331a1222241931231231211122332": (
        "minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 "
        "jina-v5-nano jais-2 dbrx smaug-bpe chatglm-bpe glm4 glm5"
    ),
    "112311172711211212111283111212133122112132": "deepseek-llm",
    "11231111111111a12112111111118311121214211111112132": "deepseek-coder",
    "13321331a122532443123123121112111142": "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
    "133211111111a1225111244312211231211111111142": "spark2_5",
    "4511111111a14532422312312312111112332": "youtu",
    "112328a12221114931112111131211122332": (
        "mpt gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum "
        "modern-bert jina-v1-en jina-v2-code roberta-bpe olmo jais exaone4 trillion "
        "granite-docling"
    ),
    "1123211111111a122211149311121111312111112332": (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"
    ),
    "C2i1o": "gemma4 granite-embed-multi-311m sarvam-moe",
    "133211111111a12222419312312312111112332": (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez bailingmoe bailingmoe2 "
        "llada-moe hunyuan ufakzeka grok-2 solar-open"
    ),
    "133211111111a1225319312312312111112332": "qwen35 exaone-moe",
    "458f5493111112514142132": "poro-chat bloom gpt3-finnish",
    "4511111111a14549311111251411122132": "viking",
    "1332111111116412222419312312312111112332": "tekken",
    "11231111111111a1211211111128111111111111111211111122132": "chameleon",
    "45133164142241931231231211122332": "gpt-4o llama4 kanana2 talkie minimax-m2",
    "4513316414531931231231211122332": "granite-embed-multi-97m",
    "451133a14531931231231211122332": "tiny_aya cohere2moe",
    "a133a1H2a": "superbpe",
    "133211111111a1222213193122112312111112332": "seed-coder",
    "451331a14224112631231231211122332": "kimi-k2",
    "13321133a122532713123123121112111142": "afmoe",
    "133211111111a1222222193122112312111112332": "laguna",
}


def cut(name: str, text: str) -> list[str]:
    row = PRE_TOKENIZERS[name]
    pieces = [piece for piece, _ in cutter(row).pre_tokenize_str(text)]
    if row.byte_level:
        pieces = [bytes(CHARACTER_BYTES[c] for c in piece).decode() for piece in pieces]
    return pieces


@pytest.mark.parametrize(
    ("lengths", "name"), [(cuts, name) for cuts, names in CUTS.items() for name in names.split()]
)
def test_cuts_as_llama_cpp_does(lengths: str, name: str):
    expected = []
    start = 0
    for letter in lengths:
        stop = start + LENGTHS.index(letter)
        expected.append(TEXT[start:stop])
        start = stop
    assert start == len(TEXT)
    assert cut(name, TEXT) == expected


def test_every_row_has_its_cuts():
    assert {name for names in CUTS.values() for name in names.split()} == PRE_TOKENIZERS.keys()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # From llama.cpp (b11434), as above.
        ("gpt-2", "we'll  WE'LL", ["we", "'ll", " ", " WE", "'", "LL"]),
        ("llama-bpe", "x  \n\n  y", ["x", "  \n\n", " ", " y"]),
        ("tekken", "ABCéDE1 Abc", ["ABCé", "DE", "1", " Abc"]),
        ("deepseek-llm", "a\u3000漢 \u3000", ["a", "\u3000", "漢", " \u3000"]),
        ("tiny_aya", "   12345", ["  ", " ", "12", "345"]),
        ("exaone-moe", "a b c1", ["a b c", "1"]),
        ("poro-chat", "end. (x)", ["end", ". (", "x", ")"]),
        ("superbpe", "12 12345 123456", ["12", " ", "12", "345", " ", "123", "456"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_cuts_short_texts(name: str, text: str, expected: list[str]):
    assert cut(name, text) == expected


def seconds(splitter: pre_tokenizers.PreTokenizer, text: str) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        splitter.pre_tokenize_str(text)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize(
    ("name", "unit", "end"),
    [
        ("deepseek-llm", " ", "5"),  # white space that might be the end of the text
        ("tiny_aya", "1", ""),  # digits that are grouped from the right
        ("superbpe", "1", ""),
        ("tekken", "A", "1"),  # capitals that might go before a small letter
        ("bailingmoe", " ", "x"),  # white space that might go before a line break
        ("chameleon", "1", ""),  # digits that might end in ">"
    ],
)
def test_long_runs_take_linear_time(name: str, unit: str, end: str):
    splitter = cutter(PRE_TOKENIZERS[name])
    short = seconds(splitter, "<sentinel:" + unit * 10_000 + end)
    long = seconds(splitter, "<sentinel:" + unit * 80_000 + end)
    assert long < 24 * short + 0.03  # eight times is linear; a search from each place takes 64
