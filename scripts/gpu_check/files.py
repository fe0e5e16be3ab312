"""The models that texts and speeds are of."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.gpu_check.rows import SKIPPED, Case, Row, Setting

TINY = Path("a tiny model")  # stands for one that is made on the spot


def models(setting: Setting) -> list[Path]:
    """Of the folder that was given; in a rehearsal without one, a tiny one."""
    if setting.models is None:
        return [TINY] if setting.rehearse else []
    found = sorted(setting.models.glob("*.gguf"))
    return [path for path in found if "-of-" not in path.stem or "-00001-of-" in path.stem]


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """A path that is there."""
    if path != TINY:
        yield path
        return
    from tests.helpers.tiny_models import endless_text_model  # needs gguf-py

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "tiny.gguf"
        made.write_bytes(endless_text_model(n_ctx=1024, weight_type="Q8_0"))
        yield made


def absent(setting: Setting) -> Case:
    """What stands in the table where there are no models."""
    where = "--models DIR was not given" if setting.models is None else f"{setting.models} has none"
    row = Row(name="real models", state=SKIPPED, note=f"{where}: DIR/*.gguf are used")
    return Case(name=row.name, run=lambda: [row])
