"""How far the fast paths are from exact arithmetic, ours and llama.cpp's, for files of any type.

    python -m tests.helpers.divergence MODEL.gguf ...

For each file: mean KL divergence, over the tokens of the licence, from float32 on the weights as
they are (precision "highest") to precision "default", in prefill and in decode, and to
llama.cpp, where llama-cpp-python is installed.
"""

import sys
from pathlib import Path

import numpy as np

import minfer_jax
from minfer_jax.divergence import log_softmax

TEXT = Path(__file__).parents[2] / "LICENSE"
N_DECODE = 64  # tokens; of the prefill, all


def divergence(exact: np.ndarray, logits: np.ndarray) -> float:
    """Mean over rows of KL(exact || logits); `exact` holds logarithms of probabilities."""
    exact = exact[: len(logits)]
    return float((np.exp(exact) * (exact - log_softmax(logits)[0])).sum(-1).mean())


def peer_logits(path: str, tokens: list[int]) -> np.ndarray | None:
    """What llama.cpp gives, or None where it is not installed."""
    try:
        import llama_cpp  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    llm = llama_cpp.Llama(path, n_ctx=len(tokens), logits_all=True, verbose=False)
    llm.eval(tokens)
    return np.array(llm.scores[: len(tokens)], np.float32)


def main(paths: list[str]) -> None:
    """Print a row a file."""
    print(f"{'file':24} {'prefill':>9} {'decode':>9} {'llama.cpp':>9} {'decode':>9}")
    for path in paths:
        engine = minfer_jax.load(path, n_ctx=512, precision="highest")
        assert engine.tokenizer is not None
        tokens = engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:512]
        exact, _ = log_softmax(engine.logits(tokens))
        engine = minfer_jax.load(path, n_ctx=512)
        found = [engine.logits(tokens), engine.logits(tokens[:N_DECODE], chunk=1)]
        if (peer := peer_logits(path, tokens)) is not None:
            found += [peer, peer[:N_DECODE]]
        row = " ".join(f"{divergence(exact, logits):9.1e}" for logits in found)
        print(f"{Path(path).stem:24} {row}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
