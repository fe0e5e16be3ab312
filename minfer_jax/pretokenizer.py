r"""How byte pair encoding cuts text into words before it merges: one row a `tokenizer.ggml.pre`.

A row has one or more patterns. Each cuts the pieces that the one before it left: what it matches
is a piece, and so is what lies between two matches. Merges never cross the edge of a piece.

    "deepseek-llm", "\nHi  42"   [\r\n]         "\n" | "Hi  42"
                                 \s?[A-Za-z]+   "\n" | "Hi" | "  42"
                                 \p{N}+         "\n" | "Hi" | "  " | "42"

The patterns are written for Oniguruma, the engine inside `tokenizers`. They cut as llama.cpp does
(its `llama-vocab.cpp` names them, its `unicode.cpp` runs them), which is not always what the
model's own tokenizer.json says, and so that no text costs more than time linear in its length:

- llama.cpp's character classes are those of Unicode 15.1; `_LATER` is what it does not know.
- Where a pattern has no \p class, white space beyond ASCII matches \s and nothing else there.
- A class inside \p{L}, as \p{Lu}, is \p{L} there.
- A search that would run to the end of a long run from each place in it (of digits that are
  grouped from the right, of white space before the end) is tied to the start of the run.
"""

import re
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

# Assigned after Unicode 15.1: letters and symbols to a newer Oniguruma, nothing yet to llama.cpp.
_LATER = (
    r"\x{897}\x{1B4E}-\x{1B4F}\x{1B7F}\x{1C89}-\x{1C8A}\x{2427}-\x{2429}\x{31E4}-\x{31E5}"
    r"\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D40}-\x{10D8F}"
    r"\x{10EC2}-\x{10EFC}\x{11380}-\x{113E2}\x{116D0}-\x{116E3}\x{11BC0}-\x{11BF9}\x{11F5A}"
    r"\x{13460}-\x{143FA}\x{16100}-\x{16139}\x{16D40}-\x{16D79}\x{18CFF}\x{1CC00}-\x{1CEB3}"
    r"\x{1E5D0}-\x{1E5FF}\x{1F8B2}-\x{1F8C1}\x{1FA89}-\x{1FA8F}\x{1FABE}\x{1FAC6}"
    r"\x{1FADC}-\x{1FADF}\x{1FAE9}\x{1FBCB}-\x{1FBEF}"
)

# Pieces of patterns. "'s" and its like, in either case or in small letters only:
_SUFFIX = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SUFFIX_LOWER = r"'(?:[stmd]|re|ve|ll)"
# White space: up to its last line break; else all but the last, which goes to the word after it.
_BREAKS = r"(?:[^\S\r\n]*+[\r\n]++)+"
_SPACES = r"\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"

_GPT2 = rf"{_SUFFIX_LOWER}| ?\p{{L}}+| ?\p{{N}}+|{_OTHER}|{_SPACES}"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_BREAKS}|{_SPACES}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_OTHER}[\r\n]*|{_BREAKS}|{_SPACES}"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BREAKS}|{_SPACES}"
)
_CJK = r"[一-龥\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_LINES = r"[^\n]+|\n+"
_NOT_STOPS = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Groups of three digits, counted from the right of the run, the first one with what is before it:
# "in 1234567" is "in 1" | "234" | "567".
_GROUPED_DIGITS = (
    r"\G[^\p{N}]*+\p{N}++",
    r"\A[^\p{N}]*+(?:\p{N}{1,2}(?=(?>(?:\p{N}{3})+)\z)|\p{N}{1,3})|\p{N}{3}",
)


def _cased_word(uncased: str, suffix: str) -> str:
    """A word: capitals, then small letters; letters without case (as all beyond ASCII) are both.

    Written so that nothing is ever taken back: of "ABC" + "é" + "DE" + "1" a plain "capitals, then
    small letters" would take all six letters first and then give up those after "é" one by one.
    """
    before = r"[^\r\n\p{L}\p{N}]?"
    word = rf"[A-Z{uncased}]*+[a-z][a-z{uncased}]*|(?:[A-Z]*+{uncased}++)+"
    return rf"{before}(?:{word}){suffix}|{before}[A-Z]+{suffix}"


_UNCASED, _UNCASED_OR_MARK = r"[\p{L}&&[^A-Za-z]]", r"[\p{L}\p{M}&&[^A-Za-z]]"
_AFTER_CASED = rf"{_OTHER}[\r\n/]*|{_BREAKS}|{_SPACES}"
_GPT4O = rf"{_cased_word(_UNCASED, f'(?:{_SUFFIX})?')}|\p{{N}}{{1,3}}|{_AFTER_CASED}"

# Cased letters, as of the Unicode version that this model's authors wrote the ranges from.
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{1DF2A}]]"
)
_DEEPSEEK_PUNCTUATION = r"[!-/:-~！-／：-～‘-‟、-。]"
_DEEPSEEK_CJK = r"[[一-龥\x{800}-\x{4E00}가-\x{D7FF}]&&\S]+"

_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
# U+8C48 is what llama.cpp has; the ideograph that it was before normalisation is U+F900.
_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}"
    r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}"
    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """One way to cut text, and what else `tokenizer.ggml.pre` stands for.

    Attributes:
        patterns: Oniguruma patterns, applied one after the other.
        ignore_merges: a piece that is a token is that token, whatever its merges would make of it.
        add_bos: whether a text begins with BOS where the file does not say.
        byte_level: tokens are written in GPT-2's alphabet of 256 characters, one a byte. If not,
            in UTF-8 with U+2581 for the space, and byte tokens for what the vocabulary lacks.
        whole_breaks: a piece that is line breaks only is one token, where there is such a one.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True
    whole_breaks: bool = False


_GPT2_ROW = PreTokenizer(patterns=(_GPT2,))
_LLAMA3_ROW = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_MERGED_ROW = PreTokenizer(patterns=(_LLAMA3,))
_GLM4_ROW = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True)
_QWEN2_ROW = PreTokenizer(patterns=(_QWEN2,))
_STARCODER_ROW = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_BLOOM_ROW = PreTokenizer(patterns=(_NOT_STOPS,))
_DEEPSEEK3_ROW = PreTokenizer(patterns=(r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_GPT4O_ROW = PreTokenizer(patterns=(_GPT4O,))
_GEMMA4_ROW = PreTokenizer(patterns=(_LINES,), add_bos=True, byte_level=False, whole_breaks=True)
_TINY_AYA_ROW = PreTokenizer(
    patterns=(
        *_GROUPED_DIGITS,
        rf"{_MARKED_WORD}(?:{_SUFFIX})?|\p{{N}}{{1,3}}|{_AFTER_CASED}",
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(patterns=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_ROW,
    "a.x-4.0": _GPT2_ROW,
    "exaone4": _GPT2_ROW,
    "gigachat": _GPT2_ROW,
    "granite-docling": _GPT2_ROW,
    "jais": _GPT2_ROW,
    "jina-de": _GPT2_ROW,
    "jina-es": _GPT2_ROW,
    "jina-v1-en": _GPT2_ROW,
    "jina-v2-code": _GPT2_ROW,
    "jina-v2-de": _GPT2_ROW,
    "jina-v2-es": _GPT2_ROW,
    "mellum": _GPT2_ROW,
    "modern-bert": _GPT2_ROW,
    "mpt": _GPT2_ROW,
    "olmo": _GPT2_ROW,
    "phi-2": _GPT2_ROW,
    "roberta-bpe": _GPT2_ROW,
    "trillion": _GPT2_ROW,
    "llama-bpe": _LLAMA3_ROW,
    "falcon-h1": _LLAMA3_ROW,
    "falcon3": _LLAMA3_ROW,
    "jina-v5-nano": _LLAMA3_ROW,
    "lfm2": _LLAMA3_ROW,
    "llama-v3": _LLAMA3_ROW,
    "llama3": _LLAMA3_ROW,
    "midm-2.0": _LLAMA3_ROW,
    "pixtral": _LLAMA3_ROW,
    "chatglm-bpe": _LLAMA3_MERGED_ROW,
    "dbrx": _LLAMA3_MERGED_ROW,
    "smaug-bpe": _LLAMA3_MERGED_ROW,
    "glm4": _GLM4_ROW,
    "glm5": _GLM4_ROW,
    "qwen2": _QWEN2_ROW,
    "bailingmoe": _QWEN2_ROW,
    "bailingmoe2": _QWEN2_ROW,
    "deepseek-r1-qwen": _QWEN2_ROW,
    "f2llmv2": _QWEN2_ROW,
    "grok-2": _QWEN2_ROW,
    "hunyuan": _QWEN2_ROW,
    "kormo": _QWEN2_ROW,
    "llada-moe": _QWEN2_ROW,
    "megrez": _QWEN2_ROW,
    "solar-open": _QWEN2_ROW,
    "stablelm2": _QWEN2_ROW,
    "qwen35": PreTokenizer(
        patterns=(
            rf"{_SUFFIX}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|{_BREAKS}|{_SPACES}",
        )
    ),
    "laguna": PreTokenizer(patterns=(_LINES, _QWEN2)),
    "ufakzeka": PreTokenizer(patterns=(rf"{_WORD}|\p{{N}}|{_OTHER}[\r\n]*|{_BREAKS}|{_SPACES}",)),
    "seed-coder": PreTokenizer(
        patterns=(rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BREAKS}|{_SPACES}",)
    ),
    "minicpm5": PreTokenizer(
        patterns=(
            r"\p{N}{1,3}",
            rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_OTHER}[\r\n]*|{_BREAKS}|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    "jais-2": PreTokenizer(
        patterns=(
            rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_BREAKS}"
            r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)"
            r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s",
        )
    ),
    "exaone-moe": PreTokenizer(
        patterns=(
            rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"|{_OTHER}[\r\n/]?|{_BREAKS}|{_SPACES}",
        )
    ),
    "starcoder": _STARCODER_ROW,
    "codeshell": _STARCODER_ROW,
    "command-r": _STARCODER_ROW,
    "exaone": _STARCODER_ROW,
    "mellum2": _STARCODER_ROW,
    "minerva-7b": _STARCODER_ROW,
    "refact": _STARCODER_ROW,
    "smollm": _STARCODER_ROW,
    "falcon": PreTokenizer(patterns=(r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "bloom": _BLOOM_ROW,
    "gpt3-finnish": _BLOOM_ROW,
    "poro-chat": _BLOOM_ROW,
    "viking": PreTokenizer(patterns=(_NOT_STOPS, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            rf"\s?{_DEEPSEEK_PUNCTUATION}+",
            r"(?<!\s)\s++\z",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek-v3": _DEEPSEEK3_ROW,
    "hunyuan-dense": _DEEPSEEK3_ROW,
    "hy_v4": _DEEPSEEK3_ROW,
    "joyai-llm": _DEEPSEEK3_ROW,
    "afmoe": PreTokenizer(patterns=(*_GROUPED_DIGITS, _ASIAN, _DEEPSEEK3)),
    "spark2_5": PreTokenizer(
        patterns=(
            r"\p{N}{1,3}",
            _CJK,
            rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}",
            r"\p{N}",
        )
    ),
    "gpt-4o": _GPT4O_ROW,
    "kanana2": _GPT4O_ROW,
    "llama4": _GPT4O_ROW,
    "minimax-m2": _GPT4O_ROW,
    "talkie": _GPT4O_ROW,
    "granite-embed-multi-97m": PreTokenizer(
        patterns=(
            rf"{_cased_word(_UNCASED_OR_MARK, f'(?:{_SUFFIX})?')}"
            rf"|\p{{N}}{{1,3}}|{_AFTER_CASED}",
        ),
        ignore_merges=True,
    ),
    "tekken": PreTokenizer(
        patterns=(rf"{_cased_word(_UNCASED, '')}|\p{{N}}|{_AFTER_CASED}",),
        ignore_merges=True,
        add_bos=True,
    ),
    "tiny_aya": _TINY_AYA_ROW,
    "cohere2moe": _TINY_AYA_ROW,
    "youtu": PreTokenizer(
        patterns=(
            r"[가-힣\x{3131}-\x{318E}]+|[！…“”‘’—：；，、-\x{303F}\x{FE30}-\x{FE4F}]+"
            rf"|[\x{{3105}}-\x{{312F}}]+|{_CJK}",
            rf"{_MARKED_WORD}(?:{_SUFFIX})?|\p{{N}}|{_AFTER_CASED}",
        ),
        ignore_merges=True,
    ),
    "kimi-k2": PreTokenizer(
        patterns=(
            rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_SUFFIX})?"
            rf"|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_BREAKS}|{_SPACES}",
        )
    ),
    "superbpe": PreTokenizer(
        # The second makes groups of three ASCII digits, counted from the right of their run.
        patterns=(
            r"\p{N}+",
            r"\G(?<=[0-9]{3})[0-9]{3}|[0-9]{3}(?=(?>(?:[0-9]{3})*)(?![0-9]))",
        )
    ),
    "chameleon": PreTokenizer(
        patterns=(
            r"<sentinel:[0-9]++>",
            r"IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gemma4": _GEMMA4_ROW,
    "granite-embed-multi-311m": _GEMMA4_ROW,
    "sarvam-moe": PreTokenizer(patterns=(_LINES,), byte_level=False),
}


def cutter(row: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Builds what cuts text, and writes the pieces in GPT-2's alphabet if the row says so."""
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(_in_unicode_15_1(pattern)), "isolated")
        for pattern in row.patterns
    ]
    if row.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _in_unicode_15_1(pattern: str) -> str:
    """Writes the pattern so that its classes \\p{L}, N, P, M and S are those of Unicode 15.1."""
    return re.sub(r"\\p\{[LNPMS]\}", lambda found: f"[{found[0]}&&[^{_LATER}]]", pattern)
