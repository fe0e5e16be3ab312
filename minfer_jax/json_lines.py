"""What is told of tokens and answers as JSON, one line each; the names are OpenAI's.

{"id": 253, "token": " a", "bytes": [32, 97], "logprob": -0.31,
 "top_logprobs": [{"id": 253, "token": " a", "bytes": [32, 97], "logprob": -0.31}, ..]}
{"index": 0, "text": "It scatters.", "finish_reason": "stop"}
"""

import json
from typing import Any

from minfer_jax.run_options import Drawn
from minfer_jax.tokenizer import Tokenizer


def token_line(drawn: Drawn, tokenizer: Tokenizer) -> str:
    """A token, how likely it was, and what else might have been in its place."""
    top = [_token(token, logprob, tokenizer) for token, logprob in drawn.top]
    return _line({**_token(drawn.token, drawn.logprob, tokenizer), "top_logprobs": top})


def sample_line(index: int, text: str, finish_reason: str) -> str:
    """One of several answers."""
    return _line({"index": index, "text": text, "finish_reason": finish_reason})


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    text = data.decode("utf-8", "replace")  # a token may be part of a character
    return {"id": token, "token": text, "bytes": list(data), "logprob": round(logprob, 6)}


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
