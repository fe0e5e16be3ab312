"""What `import minfer_jax` offers, at what cost, and what the package says about itself."""

import ast
import importlib
import pkgutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import minfer_jax
from minfer_jax.__main__ import COMMANDS, help_text, main

ROOT = Path(__file__).resolve().parent.parent


def test_importing_the_package_loads_nothing_heavy():
    """Nor does the text side, by attribute, nor what fetches models; `load` does load jax."""
    code = """
import sys
import minfer_jax
heavy = {"jax", "jaxlib", "numpy", "gguf", "tokenizers", "jinja2"}
print(*heavy & set(sys.modules))
minfer_jax.chat_template.ChatTemplate, minfer_jax.sources.resolve, minfer_jax.tokenizer.Tokenizer
print(*{"jax", "jaxlib", "httpx2", "huggingface_hub", "filelock"} & set(sys.modules))
minfer_jax.load
print("jax" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == ["", "", "True"]


@pytest.mark.parametrize(
    "name",
    [
        "LanguageModel",
        "chat_template.ChatTemplate",
        "compile_cache.enable",
        "engine.Engine",
        "gguf.open_gguf",
        "language_model.from_file",
        "load",
        "model.forward.forward",
        "presets.load",
        "quant.matmul.qmatmul",
        "sampling.SamplingParams",
        "sources.resolve",
        "tokenizer.Tokenizer.from_gguf",
    ],
)
def test_names_that_are_promised(name):
    assert callable(pkgutil.resolve_name(f"minfer_jax.{name}"))
    assert name.split(".")[0] in dir(minfer_jax)


def test_the_package_is_no_command_but_names_them(capsys):
    assert main(["minfer_jax"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (help_text(), "")
    assert all(f"  {name} " in out for name in COMMANDS)
    assert main(["minfer_jax", "chat", "hello"]) == 2
    assert "as in python -m minfer_jax.chat (" in capsys.readouterr().err
    assert main(["minfer_jax", "--version"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_its_version(command, capsys, monkeypatch):
    main = importlib.import_module(f"minfer_jax.{command}").main
    assert main([command, "--version", "--bogus"]) == 0
    assert capsys.readouterr() == (f"minfer-jax {metadata.version('minfer-jax')}\n", "")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert main([command, "--version"]) == 0
    assert "is not installed" in capsys.readouterr().out


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'minfer_jax' has no attribute 'lode'"):
        _ = minfer_jax.lode
    assert not hasattr(minfer_jax, "os")


def test_star_names_exist():
    assert minfer_jax.__all__ == [
        *("Add", "Conversation", "LanguageModel", "Replace", "Trace"),
        "load",
    ]
    for name in minfer_jax.__all__:
        assert getattr(minfer_jax, name)


def test_project_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "minfer-jax"
    assert project["requires-python"] == ">=3.11"
    assert {"dev", "cuda", "metal"} <= project["optional-dependencies"].keys()
    assert (ROOT / project["readme"]).is_file()
    assert all((ROOT / name).is_file() for name in project["license-files"])
    needed = {line.split(">")[0].split("[")[0] for line in project["dependencies"]}
    assert {"jax", "numpy", "gguf", "tokenizers", "jinja2", "absl-py"} <= needed
    assert metadata.version("minfer-jax") == project["version"]


def test_presets_go_into_the_package():
    """Where `presets.folder` looks for them once it is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    assert packages == {"minfer_jax": "minfer_jax", "minfer_jax/configs": "configs"}
    assert not (ROOT / "minfer_jax" / "configs").exists()


def test_dependencies_are_what_is_imported():
    """By name of the module; pip is run, not imported; jaxlib comes with jax."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["plot"]
    declared = {line.split(">")[0].split("[")[0] for line in lines}
    declared = {"absl" if name == "absl-py" else name for name in declared - {"pip"}}
    imported = set()
    for path in (ROOT / "minfer_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names - {"minfer_jax", "jaxlib"} == declared
