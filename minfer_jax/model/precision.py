"""What the two names of precision mean on this machine."""

from pathlib import Path

import jax

PRECISIONS = ("highest", "default")
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm, as Linux names them


def dtypes(precision: str) -> tuple[str, str]:
    """(dtype of products, dtype of the KV cache) for a precision.

    "highest" is float32 throughout. "default" is what is fast here: bfloat16 products where the
    processor has instructions for them (float32 is faster where XLA would have to emulate), and a
    float16 cache.

    Raises:
        ValueError: there is no such precision.
    """
    if precision == "highest":
        return "float32", "float32"
    if precision == "default":
        fast = jax.default_backend() != "cpu" or cpu_has_bf16()
        return "bfloat16" if fast else "float32", "float16"
    raise ValueError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 natively; False where the system does not say."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    lines = (line for line in text.splitlines() if line.lower().startswith(("flags", "features")))
    return any(_BF16_FLAGS & set(line.split()) for line in lines)
