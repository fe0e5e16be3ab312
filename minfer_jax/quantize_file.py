"""Makes the quantised file: reads, quantises and writes a piece at a time, in several threads.

    file ---> pieces of whole blocks ---> threads: float32, then blocks ---> in order, to the file

A tensor is one run of blocks, whatever its shape: rows are whole blocks, in the old type and in the
new one. So memory holds a few pieces, not a tensor.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from minfer_jax import gguf_writer
from minfer_jax.gguf import GGUFFile
from minfer_jax.gguf_header import padded, shown
from minfer_jax.gguf_types import GGML_TYPES, TYPE_IDS
from minfer_jax.quant import quantizers
from minfer_jax.quantize_choice import Choice

PIECE = 1 << 18  # weights; a multiple of every block, and small enough for the caches

_RELEASE = 64  # pieces after which what was read is no longer kept in memory
_QUANTIZATION_VERSION = 2  # ggml.h, GGML_QNT_VERSION


def header(file: GGUFFile, choices: Sequence[Choice], file_type: int) -> bytes:
    """Makes the header of the new file.

    Args:
        file: the model.
        choices: a type for each tensor, in file order.
        file_type: the value of `general.file_type`.

    Returns:
        Metadata as it was, in its order, but for what tells of the types and of a split; then the
        tensors.
    """
    changed = {
        key: gguf_writer.uint32_record(key, value)
        for key, value in (
            ("general.file_type", file_type),
            ("general.quantization_version", _QUANTIZATION_VERSION),
        )
    }
    kept = [key for key in file.records if not key.startswith("split.")]
    records = [changed.pop(key) if key in changed else file.record(key) for key in kept]
    tensors = ((c.info.name, c.info.shape, TYPE_IDS[c.type]) for c in choices)
    return gguf_writer.header([*records, *changed.values()], tensors, file.alignment)


def size(file: GGUFFile, choices: Sequence[Choice], file_type: int) -> int:
    """Bytes that the new file will have."""
    parts = (len(header(file, choices, file_type)), *(c.nbytes for c in choices))
    return sum(padded(n, file.alignment) for n in parts)


def write(
    file: GGUFFile,
    choices: Sequence[Choice],
    out: Path,
    *,
    file_type: int,
    threads: int,
    on_bytes: Callable[[int], object] = lambda n: None,
) -> None:
    """Writes the new file; it is there when it is complete, or not at all.

    Args:
        file: the model.
        choices: a type for each tensor, in file order.
        out: path of the new file; a file that is there is replaced.
        file_type: the value of `general.file_type`.
        threads: how many quantise at a time.
        on_bytes: called with the number of bytes just written.

    Raises:
        ValueError: weights are not finite, or too large for their new type.
        OSError: the file cannot be written.
    """
    with (
        gguf_writer.written(out, size(file, choices, file_type)) as target,
        contextlib.closing(_in_order(_pieces(file, choices), threads)) as pieces,
    ):
        target.write(header(file, choices, file_type))
        gguf_writer.pad(target, file.alignment)
        for i, (choice, data, last) in enumerate(pieces):
            target.write(data.data)
            if last:
                gguf_writer.pad(target, file.alignment)
            if last or i % _RELEASE == 0:
                file.release(choice.info.name)
            on_bytes(data.nbytes)


_Piece = tuple[Choice, np.ndarray, bool]


def _pieces(file: GGUFFile, choices: Sequence[Choice]) -> Iterator[Callable[[], _Piece]]:
    """What is to be done for each piece, with no data read yet; the last of a tensor says so."""
    for choice in choices:
        step = GGML_TYPES[choice.info.ggml_type].nbytes(PIECE)
        raw = file.raw(choice.info.name).reshape(-1)
        for start in range(0, raw.size, step):
            yield lambda part=raw[start : start + step], choice=choice, stop=start + step: (
                choice,
                _convert(file, choice, part),
                stop >= choice.info.nbytes,
            )


def _convert(file: GGUFFile, choice: Choice, raw: np.ndarray) -> np.ndarray:
    """uint8, blocks of the old type -> uint8, blocks of the new one."""
    if choice.type == choice.old:
        return raw
    x = quantizers.dequantize(raw, choice.info.ggml_type)
    largest = float(np.abs(x).max(initial=0))
    limit = quantizers.largest(choice.type)
    if not largest <= limit:  # nor if it is NaN
        raise ValueError(
            f"{file.path}: tensor '{shown(choice.info.name)}' holds a weight of {largest:.4g}, "
            f"expected at most {limit:.4g} for {choice.type}"
        )
    return quantizers.quantize(x, choice.type)


def _in_order(jobs: Iterable[Callable[[], _Piece]], threads: int) -> Generator[_Piece, None, None]:
    """The results of jobs in their order; no more are begun than keeps the threads busy."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_Piece]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
