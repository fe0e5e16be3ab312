"""A peer of the bench in a process of its own: one JSON line in, one JSON line out.

Run as a script, by a Python that has the peer's package; so it uses the standard library, that
package, and nothing of minfer_jax.

    {"op": "hello", "peer": "llama.cpp"}             -> {"version": "llama-cpp-python 0.3.36"}
    {"op": "load", "model": path, "n_ctx": n, "threads": n,
     "settings": {"flash_attn": true}}               -> {}
    {"op": "run", "n_prompt": n, "n_gen": n}         -> {"seconds": s}

A run with n_gen 0 times the prompt, else n_gen single tokens after it; which tokens they are makes
no difference. What fails is {"error": line}, with "missing": true where the package is not
installed. The worker ends with its input.
"""

import importlib
import importlib.metadata
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

_BATCH = 512  # tokens, of a batch and of a micro-batch
_TOKENS = 32  # every vocabulary has as many


class LlamaCpp:
    """llama.cpp through llama-cpp-python's public class."""

    def __init__(
        self, module: Any, *, model: str, n_ctx: int, threads: int, settings: dict[str, bool]
    ) -> None:
        self._llama = module.Llama(
            model,
            n_ctx=n_ctx,
            n_batch=_BATCH,
            n_ubatch=_BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            verbose=False,
            **settings,
        )

    def start(self) -> None:
        """Empty the context."""
        self._llama.reset()

    def feed(self, ids: list[int]) -> None:
        """Run tokens after those that are in the context."""
        self._llama.eval(ids)


class IkLlamaCpp:
    """ik_llama.cpp through the C interface that ik-llama-cpp-python binds.

    Its own class offers no choice of batch and threads, and no repacking of weights at load.
    """

    def __init__(
        self, module: Any, *, model: str, n_ctx: int, threads: int, settings: dict[str, bool]
    ) -> None:
        self._c = c = module
        c.llama_backend_init()
        of_model = c.llama_model_default_params()
        of_model.n_gpu_layers = 0
        of_model.repack_tensors = settings["repack"]
        of_context = c.llama_context_default_params()
        of_context.n_ctx = n_ctx
        of_context.n_batch = of_context.n_ubatch = _BATCH
        of_context.n_threads = of_context.n_threads_batch = threads
        of_context.flash_attn = settings["flash_attn"]
        self._model = c.llama_model_load_from_file(os.fsencode(model), of_model)
        if not self._model:
            raise ValueError("the model cannot be loaded")
        self._context = c.llama_init_from_model(self._model, of_context)
        if not self._context:
            raise ValueError("there is no context for the model")
        self._batch = c.llama_batch_init(_BATCH, 0, 1)
        self._position = 0

    def start(self) -> None:
        """Empty the context."""
        self._c.llama_kv_cache_clear(self._context)
        self._position = 0

    def feed(self, ids: list[int]) -> None:
        """Run tokens after those that are in the context."""
        batch = self._batch
        for begin in range(0, len(ids), _BATCH):
            part = ids[begin : begin + _BATCH]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = self._position + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = i == len(part) - 1
            status = self._c.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode gave status {status}")
            self._position += len(part)


PEERS = {  # name: package, module, class
    "llama.cpp": ("llama-cpp-python", "llama_cpp", LlamaCpp),
    "ik_llama.cpp": ("ik-llama-cpp-python", "ik_llama_cpp._ctypes_api", IkLlamaCpp),
}


def serve(requests: Iterable[str], reply: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests, lines of JSON, until there are no more; `reply` takes each answer."""
    module: Any = None
    make: Any = None
    engine: Any = None
    for line in requests:
        request = json.loads(line)
        op = request.pop("op")
        try:
            if op == "hello":
                package, name, make = PEERS[request["peer"]]
                module = importlib.import_module(name)
                reply({"version": f"{package} {importlib.metadata.version(package)}"})
            elif op == "load":
                engine = make(module, **request)
                _seconds(engine, 8, 2)  # touches every weight once
                reply({})
            else:
                reply({"seconds": _seconds(engine, request["n_prompt"], request["n_gen"])})
        except ModuleNotFoundError as e:
            reply({"error": str(e), "missing": True})
        except Exception as e:  # noqa: BLE001  it is told to the bench, which goes on or not
            reply({"error": " ".join(f"{type(e).__name__}: {e}".split())})


def _seconds(engine: Any, n_prompt: int, n_gen: int) -> float:
    prompt = [i % _TOKENS for i in range(n_prompt)]
    engine.start()
    begin = time.perf_counter()
    engine.feed(prompt)
    if n_gen:
        begin = time.perf_counter()
        for i in range(n_gen):
            engine.feed([i % _TOKENS])
    return time.perf_counter() - begin


def main() -> None:
    """Speak over standard input and output; what the peer's library prints goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the bench's to handle
    # The folder of this file came first in the path: its modules are not the peer's.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != here]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    serve(sys.stdin, reply)


if __name__ == "__main__":
    main()
