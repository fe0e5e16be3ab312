"""The shape of the package: who may import whom, and how long a file may be.

Imports are read from the source. What must not be loaded is also looked for in a fresh process.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "minfer_jax"
MAX_LINES = 500

# Bottom up: a module imports only from rows above its own in this list, that is, written earlier.
# "quant.formats" alone is the package's own file, "quant.formats.*" stands for the files in it.
LAYERS = (
    # the text side
    "gguf_types",
    "gguf_header",
    "gguf",
    "whole_file",
    "plotting",
    "gguf_writer",
    "template_meter",
    "template_sandbox",
    "chat_template",
    "nearest",
    "host memory usage device compact_json progress",  # the machine, and the user's cache
    "prompt_file flag_table",
    # where models come from
    "sources.transfer sources.split",
    "sources.record sources.lock",
    "sources.wheel sources.folder sources.http_client",
    "sources.aliases sources.hub_choice sources.http_fetch",
    "sources.hub_cache sources.ollama sources.url",
    "sources.hub_fetch",
    "sources.hub",
    "sources.references",
    "sources",
    "sources.cached",
    "sources.remove",
    # texts and tokens
    "vocab special_tokens stream_decoder",
    "spm pretokenizer",
    "bpe",
    "tokenizer",
    "stop_strings constraint",
    "prompt thinking",
    "transcript",
    # weights and their product
    "quant.formats.base quant.formats.codebooks quant.formats.grids",
    "quant.formats.*",
    "quant.formats",
    "quant.quantizers.fit quant.quantizers.pack",
    "quant.quantizers.*",
    "quant.quantizers",
    "quant.qtensor quant.prologue quant.cache",
    "quant.native",
    "quant.xla quant.native.calls quant.kernels",
    "pallas.blocks pallas.scoring pallas.unpack",
    "pallas.attention_tiles",
    "pallas.attention_merge",
    "pallas.*",
    "pallas",
    "quant.matmul",
    "quant.experts quant",
    # the model
    "model.precision model.rope model.moe",
    "model.config",
    "model.params model.kv_state model.keys model.tap",
    "model.layers model.attention model.names model.map_names model.steering",
    "model.summary",
    "model.mlp model.lora",
    "model.block",
    "model.forward model.patches",
    "model.traced model.graph model.lens",
    "model.graph_xla",
    "model.archs.base",
    "model.archs.common",
    "model.archs.*",
    "model.archs",
    "model.registry",
    "compile_cache program_cache",
    "model.tensors",
    "model.maps model.lora_file model.steering_file",
    "model.block_tensors",
    "model.load",
    "model",
    # the sampler
    "sampling.args sampling.order sampling.seed",
    "sampling.params",
    "sampling.state sampling.candidates",
    "sampling.draw sampling.penalties sampling.temperature sampling.top_k sampling.top_p "
    "sampling.min_p sampling.dry sampling.top_n_sigma sampling.typical sampling.mirostat "
    "sampling.logprobs",
    "sampling.xtc",
    "sampling.chain",
    "sampling.extended",
    "sampling",
    # what is built on them
    "context run_stats state_file presets sampling_flags burst adapter_flags",
    "decode_extended",
    "programs run_options",
    "kv_store",
    "session speculation",
    "decode_form prompt_lookup",
    "runner",
    "batch logit_rows tracing draw_time graph_text divergence",
    "recorder",
    "trace_file",
    "engine",
    "draft_model",
    "perplexity compare_layers",
    "text_options adapters",
    "language_model",
    "conversation json_lines",
    "metadata_report",
    "model_report models_flags command model_flags dump_flags",
    "model_command output_flags graph_dump",
    "dumps",
    "models",
    "generate_flags",
    "prompt_history chat_session chat_flags",
    "chat_input chat_turns",
    "chat_commands",
    "chat",
    "generate",
    "quantize_mix",
    "quantize_choice",
    "quantize_file quantize_flags",
    "quantize",
    "bench_worker bench_process bench_memory bench_bytes bench_table",  # nothing of each other
    "bench_peer bench_compile bench_texts bench_plot bench_reports",
    "bench_sweep bench_tests bench_drafts",
    "bench_flags",
    "bench_rows",
    "bench",
    "compare_flags compare_report",
    "compare_plot",
    "compare",
    "viz.hub viz.stored viz.flags viz.request viz.inspector",
    "viz.live",
    "viz.routes viz.loading",
    "viz.start",
    "viz",
    "viz.__main__",
    "__main__",
    "",  # minfer_jax itself
)
TEXT_SIDE = (
    "gguf",
    "tokenizer",
    "chat_template",
    "sources",
    "prompt",
    "transcript",
    "thinking",
    "stop_strings",
)
NEVER = {  # these modules, and those below them -> never import these, nor those below them
    "sampling": ("model", "engine"),
    "model": ("sampling", "tokenizer", "engine"),
    "quant": ("model", "sampling"),
    "pallas": ("model", "sampling"),
    "engine": ("tokenizer", "chat_template", "prompt", "sources"),
}


@cache
def modules() -> dict[str, Path]:
    """Name without "minfer_jax." -> file."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports, at any place in it: own modules as above, others as "/jax.numpy"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(f if _own(f) in modules() else node.module or "" for f in full)
    return frozenset(f"/{f}" if _own(f) is None else str(_own(f)) for f in found)


def _own(full: str) -> str | None:
    """A full name as a name within the package, None if it is of another."""
    inside = full == PACKAGE or full.startswith(f"{PACKAGE}.")
    return full[len(PACKAGE) + 1 :] if inside else None


@cache
def layer(name: str) -> int | None:
    rows = [row.split() or [""] for row in LAYERS]
    for wanted in (name, f"{name.rpartition('.')[0]}.*"):
        for i, row in enumerate(rows):
            if wanted in row:
                return i
    return None


def below(name: str) -> set[str]:
    """A module and all of the package that it imports, directly or not."""
    seen, todo = set(), [name]
    while todo:
        if (module := todo.pop()) not in seen:
            seen.add(module)
            todo += [m for m in imports(module) if not m.startswith("/")]
    return seen


def test_every_module_has_its_layer():
    assert not [name for name in modules() if layer(name) is None]
    listed = {name for row in LAYERS for name in row.split() or [""] if not name.endswith("*")}
    assert not listed - set(modules()), "no such modules"


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_from_lower_layers_only(name):
    own = {m: layer(m) for m in imports(name) if not m.startswith("/")}
    assert not own.keys() - modules().keys(), "no such module"
    at = layer(name)
    high = {m: i for m, i in own.items() if at is None or i is None or i >= at}
    assert not high, f"{name} is in layer {at}; these are in the same or a higher one"


@pytest.mark.parametrize("name", NEVER)
def test_rooms_that_do_not_know_of_each_other(name):
    inside = [m for m in modules() if m == name or m.startswith(f"{name}.")]
    assert inside
    reached = set().union(*map(below, inside))
    other = [m for m in reached for no in NEVER[name] if m == no or m.startswith(f"{no}.")]
    assert not other


def test_the_text_side_imports_no_jax():
    for name in TEXT_SIDE:
        for module in below(name):
            used = {m.split(".")[0] for m in imports(module)}
            assert not used & {"/jax", "/jaxlib", "/jaxtyping"}, module


def test_the_text_side_loads_no_jax():
    code = f"import sys, {', '.join(f'minfer_jax.{m}' for m in TEXT_SIDE)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.split()
    assert "minfer_jax.prompt" in loaded
    assert not [m for m in loaded if m.split(".")[0] in ("jax", "jaxlib", "jaxtyping")]


def test_the_reader_needs_numpy_only():
    for module in below("gguf"):
        outside = {m[1:].split(".")[0] for m in imports(module) if m.startswith("/")}
        assert outside <= sys.stdlib_module_names | {"numpy"}, module


@pytest.mark.parametrize(
    ("folder", "ends"),
    [
        (PACKAGE, (".py",)),
        ("tests", (".py",)),
        ("scripts", (".py",)),
        (PACKAGE, (".cpp", ".h")),
    ],
)
def test_no_file_is_long(folder: str, ends: tuple[str, ...]):
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in ends
    }
    assert len(lengths) > 5
    assert not {path: n for path, n in lengths.items() if n > MAX_LINES}
