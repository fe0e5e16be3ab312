"""Small vocabularies, as the metadata of a GGUF file."""

from typing import Any

import numpy as np

from minfer_jax.bpe import BYTE_CHARACTERS
from minfer_jax.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

BPE_SPECIAL = {
    "<|begin|>": CONTROL,
    "<|end_of_text|>": CONTROL,
    "<tool>": USER_DEFINED,
    "<tool>>": USER_DEFINED,
}
BPE_MERGES = [
    *("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"),
    *("Ċ Ċ", "1 2", "12 3", "Ġ Ġ", "ĠĠ ĠĠ", "a b", "b a", "Ã ©", "hello Ġworld", "a bc"),
]

SPM_SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<tool>": USER_DEFINED}
SPM_SCORES = {
    "▁": -1.0,
    **dict.fromkeys("helowrds<>/漢é", -30.0),
    **{"he": -5.0, "ll": -5.0, "lo": -5.0, "ell": -5.0, "oé": -5.0},
    **{"hell": -9.0, "hello": -10.0, "▁hello": -12.0},
    **{"▁w": -2.0, "or": -3.0, "▁wor": -6.0, "ld": -7.0, "▁world": -11.0},
    **{"▁▁": -4.0, "s>": -8.0, "</": -8.0, "o▁w": -40.0},
}


def tiny_bpe(pre: str | None = "llama-bpe", **changes: Any) -> dict[str, Any]:
    """Byte pair encoding: four special tokens, the 256 bytes, and what the merges make of them.

    Args:
        pre: `tokenizer.ggml.pre`.
        changes: other values of "tokenizer.ggml" keys, without that prefix; None takes a key out.
    """
    products = [merge.replace(" ", "") for merge in BPE_MERGES]
    kinds = [*BPE_SPECIAL.values(), *[NORMAL] * (256 + len(products))]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*BPE_SPECIAL, *BYTE_CHARACTERS, *products],
        "token_type": np.array(kinds, np.int32),
        "merges": BPE_MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return _metadata(values | changes)


def tiny_spm(**changes: Any) -> dict[str, Any]:
    """SentencePiece: four special tokens, the 256 byte tokens, and the pieces with their scores."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [*SPM_SPECIAL.values(), *[BYTE] * 256, *[NORMAL] * len(SPM_SCORES)]
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [*SPM_SPECIAL, *byte_tokens, *SPM_SCORES],
        "scores": np.array([0.0] * (4 + 256) + list(SPM_SCORES.values()), np.float32),
        "token_type": np.array(kinds, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata(values | changes)


def _metadata(values: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
