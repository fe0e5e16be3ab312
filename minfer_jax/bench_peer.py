"""Other engines beside ours in the bench, each in a process of its own.

So the peer's memory is not in our peak, its threads are not in our process, and its libraries meet
none of ours. It runs only while we wait for it.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_jax.bench_process import PeerError, Process, last_line

_WORKER = Path(__file__).with_name("bench_worker.py")
_TIME_LIMIT = 900.0  # seconds that one load, or one run, may take
_BATCH = 512  # tokens of a batch and of a micro-batch, as in the worker

Settings = Mapping[str, bool]


@dataclass(frozen=True, kw_only=True)
class Package:
    """A peer that is a Python package.

    Attributes:
        name: what pip installs.
        choices: the settings that it may run with.
    """

    name: str
    choices: tuple[Settings, ...]


PACKAGES = {
    "llama.cpp": Package(
        name="llama-cpp-python", choices=({"flash_attn": True}, {"flash_attn": False})
    ),
    "ik_llama.cpp": Package(
        name="ik-llama-cpp-python",
        choices=(
            {"flash_attn": True, "repack": True},
            {"flash_attn": True, "repack": False},
            {"flash_attn": False, "repack": True},
            {"flash_attn": False, "repack": False},
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One test on one file, for a peer.

    Attributes:
        model: the file.
        n_ctx: positions of context.
        threads: of the CPU.
        n_prompt: tokens of the prompt, or in the context before the generated ones.
        n_gen: 0 to time the prompt, else how many tokens to time after it.
    """

    model: Path
    n_ctx: int
    threads: int
    n_prompt: int
    n_gen: int

    @property
    def n_timed(self) -> int:
        """Tokens that are timed."""
        return self.n_gen or self.n_prompt


class PackagePeer:
    """A peer through a Python package. Of its settings the fastest are measured, test by test.

    Attributes:
        name: a key of PACKAGES.
        version: package and version.
        settings: of the test that has begun.
    """

    def __init__(self, name: str, *, python: str | None = None) -> None:
        """See that the package is there; nothing is loaded yet.

        Args:
            name: a key of PACKAGES.
            python: the interpreter that has the package; None for this one.

        Raises:
            PeerError: it is not, or there is no such interpreter.
        """
        self.name = name
        self.settings: Settings = {}
        self._python = python or sys.executable
        self._job: Job | None = None
        self._process: Process | None = None
        process, self.version = self._start()
        process.close()

    def begin(self, job: Job) -> None:
        """Run a test once with each choice of settings, and keep the fastest ready.

        Raises:
            PeerError: none of them runs: what the last one said.
        """
        self._job = job
        fastest, failure = math.inf, None
        for settings in PACKAGES[self.name].choices:
            process, _ = self._start()
            try:
                self._ask(
                    process,
                    op="load",
                    model=str(job.model),
                    n_ctx=job.n_ctx,
                    threads=job.threads,
                    settings=settings,
                )
                seconds = self._run(process, job)
                if seconds < fastest:
                    process, self._process = self._process, process
                    fastest, self.settings = seconds, settings
            except PeerError as e:
                failure = e
            finally:
                if process is not None:
                    process.close()
        if self._process is None:
            raise failure or PeerError(f"{self.name}: there are no settings to run with")

    def rate(self) -> float:
        """Tokens a second of one more run of the test that has begun."""
        assert self._process is not None and self._job is not None
        return self._job.n_timed / self._run(self._process, self._job)

    def end(self) -> None:
        """Leave the test, whether or not one has begun."""
        if self._process is not None:
            self._process.close()
        self._process = None

    def _start(self) -> tuple[Process, str]:
        process = Process(self.name, [self._python, str(_WORKER)])
        try:
            return process, str(self._ask(process, op="hello", peer=self.name).get("version"))
        except BaseException:
            process.close()
            raise

    def _run(self, process: Process, job: Job) -> float:
        answer = self._ask(process, op="run", n_prompt=job.n_prompt, n_gen=job.n_gen)
        return _positive(self.name, answer.get("seconds"))

    def _ask(self, process: Process, **request: object) -> dict[str, Any]:
        answer = process.ask(request, time_limit=_TIME_LIMIT)
        if "missing" in answer:
            package = PACKAGES[self.name].name
            raise PeerError(
                f"{self.name} is not here ({answer.get('error')}): {self._python} -m pip install"
                f" {package}, or name a Python that has it with --vs-python"
            )
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer


class LlamaBenchPeer:
    """llama.cpp through its own llama-bench, started for each run; it warms up by itself.

    Attributes: as of PackagePeer.
    """

    def __init__(self, program: str) -> None:
        """Nothing is run yet.

        Args:
            program: path of llama-bench.

        Raises:
            PeerError: there is no such program.
        """
        self.name = "llama.cpp"
        self.version = "llama-bench"
        self.settings: Settings = {}
        self._program = program
        self._job: Job | None = None
        self._output("--help")

    def begin(self, job: Job) -> None:
        """Run the test once, which also tells the version."""
        self._job = job
        self.rate()

    def rate(self) -> float:
        """Tokens a second of one run of the test that has begun."""
        job = self._job
        assert job is not None
        n_prompt, depth = (0, job.n_prompt) if job.n_gen else (job.n_prompt, 0)
        text = self._output(
            *("-m", str(job.model), "-o", "json", "-r", "1", "-t", str(job.threads), "-ngl", "0"),
            *("-b", str(_BATCH), "-ub", str(_BATCH)),
            *("-p", str(n_prompt), "-n", str(job.n_gen)),
            *(("-d", str(depth)) if depth else ()),  # older programs do not know it
        )
        try:
            (row,) = json.loads(text)
            rate, build = row["samples_ts"][0], row.get("build_commit", "")
        except (ValueError, TypeError, LookupError, RecursionError):
            said = " ".join(text.split())[:200]
            raise PeerError(f"{self._program}: expected its JSON, and it says {said!r}") from None
        self.version = f"llama-bench {build}".strip()
        return _positive(self._program, rate)

    def end(self) -> None:
        """Leave the test."""
        self._job = None

    def _output(self, *flags: str) -> str:
        try:
            ran = subprocess.run(
                [self._program, *flags],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIME_LIMIT,
            )
        except OSError as e:
            raise PeerError(f"cannot run {self._program}: {e.strerror or e}") from None
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self._program}: no end within {_TIME_LIMIT:.0f} s") from None
        if ran.returncode:
            last = last_line(ran.stderr)
            raise PeerError(f"{self._program}: ended with status {ran.returncode}{last}")
        return ran.stdout.decode("utf-8", "replace")


Peer = PackagePeer | LlamaBenchPeer


def _positive(name: str, value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise PeerError(f"{name}: expected a positive number, and it says {str(value)[:100]!r}")
    return float(value)
