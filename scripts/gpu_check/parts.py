"""The parts of the check, in order."""

from collections.abc import Callable
from dataclasses import dataclass

from scripts.gpu_check import architectures, device, exactness, rates, speeds, texts, tuning
from scripts.gpu_check.rows import Case, Setting


@dataclass(frozen=True, kw_only=True)
class Part:
    """A row of the table below.

    Attributes:
        cases: the most important first: what there is no time for is left out.
        title: of its table.
        share: of the time that is left, in proportion to those of the parts after it; what it does
            not take is theirs.
        workers: processes that share its cases; one where time is measured.
        longest: seconds that a case may take.
        timed: whether speed counts; elsewhere XLA need not look for its fastest products.
    """

    cases: Callable[[Setting], list[Case]]
    title: str
    share: float
    workers: int
    longest: float
    timed: bool


PARTS = {
    "device": Part(cases=device.cases, title="Device", share=8, workers=1, longest=60, timed=True),
    "exactness": Part(
        cases=exactness.cases,
        title="Kernels against plain XLA",
        share=20,
        workers=10,
        longest=60,
        timed=False,
    ),
    "architectures": Part(
        cases=architectures.cases,
        title="Architectures: Pallas against XLA",
        share=16,
        workers=10,
        longest=60,
        timed=False,
    ),
    "texts": Part(
        cases=texts.cases,
        title="Greedy texts: Pallas against XLA",
        share=14,
        workers=2,
        longest=90,
        timed=True,
    ),
    "tuning": Part(
        cases=tuning.cases, title="Block sizes", share=40, workers=1, longest=60, timed=True
    ),
    "speeds": Part(
        cases=speeds.cases, title="Speed of kernels", share=20, workers=1, longest=60, timed=True
    ),
    "rates": Part(
        cases=rates.cases, title="Speed of models", share=28, workers=1, longest=120, timed=True
    ),
}
ONLY_IF_ASKED = "tuning"
