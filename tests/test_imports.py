"""Who may import whom, read off the syntax trees; and what an import must not bring with it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastgen_jax
from fastgen_jax.cli import COMMANDS

PACKAGE = Path(__file__).parent.parent / "fastgen_jax"
STDLIB = sys.stdlib_module_names

# Module or folder -> what it may import beside the standard library and itself.
RULES = {
    "types": set(),
    "scheduler": {"fastgen_jax.types"},
    "detokenize": set(),
    "progress": {"rich"},
    "mii": {"fastgen_jax.types"},
    "reader": {"fastgen_jax.intake", "fastgen_jax.types"},
    "gpus": set(),
    "roofline": {"fastgen_jax.gpus"},
    "bench/load": set(),
    "bench/metrics": set(),
    "bench/drive": {"fastgen_jax.bench.load", "fastgen_jax.bench.metrics", "fastgen_jax.progress"},
    "compiler_output": set(),
    "plan": {"fastgen_jax.compiler_output", "fastgen_jax.gpus", "fastgen_jax.types"},
    "deviceless": {"jax", "fastgen_jax.compiler_output", "fastgen_jax.gpus"},
    "kernels": {"jax", "numpy"},
    "kv_pool": {"jax", "fastgen_jax.kernels"},
    "batch": {"jax", "numpy", "fastgen_jax.scheduler"},
    "sharding": {"jax", "numpy"},
    "orders": {"numpy"},
    "peers": set(),
    "models": {"jax", "numpy", "flax"}
    | {f"fastgen_jax.{name}" for name in ("kernels", "kv_pool", "batch", "sharding", "quantization")},
    "quantization": {"jax", "numpy", "fastgen_jax.kernels"},
    "schemes": {"jax", "flax", "fastgen_jax.quantization"},
    "params": {"jax", "fastgen_jax.models.layers", "fastgen_jax.quantization"},
    "sampling": {"jax", "numpy", "fastgen_jax.types", "fastgen_jax.sampling_state"},
    "sampling_state": {"jax", "numpy", "fastgen_jax.types"},
}
# What a program of another's would use, and no more; and where this machine keeps things.
PUBLIC = {"types", "mii", "progress", "machine", "multihost", *fastgen_jax.__all__}
GRPC = {"google", "grpc", "grpc_health", "grpc_reflection"}
WEB = {"fastapi", "prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn"}
RULES["serving"] = {f"fastgen_jax.{name}" for name in PUBLIC} | GRPC | WEB | {"ray"}
RULES["serving/discovery"] = set()
MAY_IMPORT_ENGINE = {"__init__", "async_engine", "pipelines", "cli", "cli_generate"}


def files(name: str) -> list[Path]:
    return sorted((PACKAGE / name).rglob("*.py")) or [PACKAGE / f"{name}.py"]


def imports(path: Path) -> set[str]:
    """Full names of the modules a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
            if node.module == "fastgen_jax":
                found |= {f"fastgen_jax.{alias.name}" for alias in node.names}
    return found - {"fastgen_jax"}


def is_below(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


@pytest.mark.parametrize("name", RULES)
def test_module_imports_only_what_it_may(name):
    for path in files(name):
        for module in imports(path):
            allowed = RULES[name] | {f"fastgen_jax.{name}"}
            known = module.split(".")[0] in STDLIB or any(is_below(module, a) for a in allowed)
            assert known, f"{path.name} imports {module}"


def test_only_the_fronts_import_the_engine():
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in MAY_IMPORT_ENGINE:
            assert "fastgen_jax.engine" not in imports(path), path


def test_only_its_own_module_imports_ray():
    for path in PACKAGE.rglob("*.py"):
        assert any(is_below(module, "ray") for module in imports(path)) is (path.stem == "ray_app"), path


def test_no_module_has_the_name_of_what_the_package_exports():
    """Importing a module puts it into the package under its name, in the place of what was there."""
    for folder in (PACKAGE, PACKAGE / "serving"):
        modules = {path.stem for path in folder.iterdir()}
        assert not modules & set(fastgen_jax.__all__)


def test_the_rules_would_notice():
    assert imports(PACKAGE / "engine.py") >= {"fastgen_jax.runner", "fastgen_jax.models.layers"}


MODEL = "jax flax numpy transformers tokenizers huggingface_hub gguf jinja2 torch"
HEAVY = f"{MODEL} rich grpc google.protobuf fastapi pydantic uvicorn prometheus_client ray"


def imported(code: str, names: str) -> list[str]:
    """Which of these modules are there after running `code` in a new process."""
    code += f"\nimport sys\nprint(*(name for name in {names.split()} if name in sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stderr.split()


@pytest.mark.parametrize(
    "module", ["fastgen_jax", "fastgen_jax.types", "fastgen_jax.scheduler", "fastgen_jax.mii", "fastgen_jax.serving"]
)
def test_importing_brings_nothing_heavy(module):
    assert imported(f"import {module}", HEAVY) == []


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_brings_nothing_heavy(command):
    arguments = [command, "--help"] if command else ["--help"]
    assert imported(f"from fastgen_jax.cli import main; main({arguments})", HEAVY) == []


def test_a_command_comes_without_the_others():
    others = " ".join(f"fastgen_jax.cli_{name}" for name in COMMANDS if name != "generate")
    assert imported("from fastgen_jax.cli import main; main(['generate', '--help'])", others) == []


def test_text_to_tokens_and_back_takes_neither_transformers_nor_the_hub():
    code = """if True:
        import fastgen_jax.engine
        tokenizer = fastgen_jax.checkpoint.resolve("smollm2-135m").tokenizer()
        assert tokenizer.decode(tokenizer("naïve café")["input_ids"]) == "naïve café" """
    assert imported(code, "transformers huggingface_hub jinja2 torch") == []


@pytest.mark.parametrize(
    "code", ["from fastgen_jax import AsyncClient, client, serve", "import fastgen_jax.serving.server"]
)
def test_clients_and_the_front_of_a_server_bring_no_model(code):
    assert imported(code, MODEL) == []


def test_what_needs_an_extra_says_so():
    code = """if True:
        import sys
        sys.modules["grpc"] = None
        import fastgen_jax
        try:
            fastgen_jax.client
        except ImportError as error:
            assert str(error) == "serving needs an extra: pip install 'fastgen-jax[serve]' (grpc is missing)", error
        else:
            raise AssertionError
        from fastgen_jax.cli import main
        assert main(["serve"]) == main(["client", "x"]) == 2"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("serving needs an extra: pip install 'fastgen-jax[serve]' (grpc") == 2
