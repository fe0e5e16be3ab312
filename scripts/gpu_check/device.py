"""The device, and its ceilings: what the other figures are held against."""

from collections.abc import Iterable

import jax
import jaxlib.version

from minfer_jax.pallas import blocks
from minfer_jax.quant import native
from scripts.gpu_check import clock
from scripts.gpu_check.rows import FAILED, MEASURED, Case, Row, Setting


def cases(setting: Setting) -> list[Case]:
    """What it is, and how fast it copies and multiplies."""
    return [
        Case(name="device", run=lambda: _device(setting)),
        Case(name="ceilings", run=lambda: _ceilings(setting)),
    ]


def _device(setting: Setting) -> Iterable[Row]:
    found = jax.devices()[0]
    cuda = jax.default_backend() == "gpu"
    note = ""
    if not cuda and not setting.rehearse:
        note = (
            f"no CUDA device: jax runs on {found.platform}; install jax[cuda13], "
            "or give --rehearse to try the script"
        )
    yield Row(
        name=found.device_kind,
        state=FAILED if note else MEASURED,
        figures={
            "platform": found.platform,
            "devices": len(jax.devices()),
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "block sizes known": sum(map(len, blocks.table().get(found.device_kind, {}).values())),
            "C++ kernels": native.isa() or "none",
        },
        note=note,
    )


def _ceilings(setting: Setting) -> Iterable[Row]:
    copy, dot = ceilings(setting)
    yield Row(name="copy", state=MEASURED, figures={"GB/s": copy / 1e9})
    yield Row(name="bfloat16 product", state=MEASURED, figures={"TFLOP/s": dot / 1e12})


def ceilings(setting: Setting) -> tuple[float, float]:
    """Bytes a second of a copy, and FLOP a second of a product of bfloat16."""
    if setting.rehearse:
        return clock.copy_rate(1 << 22), clock.product_rate(256)
    return clock.copy_rate(1 << 30), clock.product_rate(8192)
