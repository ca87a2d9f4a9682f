"""The runtime's process is free of PyTorch and of everything the exporter needs."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import dspark.configs
import dspark.providers
import dspark.runtime
from tests.conftest import ROOT
from tests.support.imports import imports

GoldenBundle = Callable[[str], Path]

HEAVY = (
    *("torch", "transformers", "optimum", "onnx", "onnx_ir", "onnxscript", "gguf", "ml_dtypes", "safetensors"),
    *("scipy", "yaml", "matplotlib", "dspark.exporter"),
)

ALLOWED = {  # what each package may import besides the standard library and itself
    "providers": {"numpy", "onnxruntime"},
    "runtime": {
        *("dspark.configs", "dspark.providers"),
        *("jinja2", "matplotlib", "numpy", "pydantic", "rich", "tokenizers", "typer", "yaml"),
    },
    "configs": {"yaml"},
}

BLOCK = f"""
import sys

class Blocker:
    def find_spec(self, name, path, target=None):
        if name in {HEAVY!r} or name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} must not be needed")

sys.meta_path.insert(0, Blocker())
"""


def run(code: str, *arguments: str) -> str:
    """Runs code in a fresh interpreter in which importing the heavy packages fails; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_block_works() -> None:
    for name in ("onnx_ir", "safetensors.numpy", "dspark.exporter.export", "yaml"):
        with pytest.raises(AssertionError, match="must not be needed"):
            run(f"import {name}")


@pytest.mark.parametrize("name", ["dspark_vanilla", "eagle3"])
def test_the_real_loop_runs_without_them(name: str, golden_bundle: GoldenBundle) -> None:
    code = f"""
import json
from dspark.runtime import Conversation, DSparkInference, RequestError, SamplingParams

inference = DSparkInference.load(sys.argv[1], threads=1, batch_size=2)
params = [SamplingParams(max_new_tokens=24), SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)]
completions = inference.generate(["tead ", "is a "], params)
text = "".join(chunk.text for chunk in inference.stream("tead ", params[0]))
assert not [module for module in sys.modules if module.partition(".")[0] in {HEAVY!r}]
print(json.dumps([completions[0].text, text, [sum(each.stats.accepted_lengths) for each in completions]]))
"""
    generated, streamed, accepted = json.loads(run(code, str(golden_bundle(name))))
    assert generated == streamed == "in the class of the stri"
    assert min(accepted) > 0


def test_the_command_line_runs_without_them(golden_bundle: GoldenBundle, tmp_path: Path) -> None:
    code = "from dspark.runtime.commands.app import main; main()"
    bundle = str(golden_bundle("dspark_vanilla"))
    assert run(code, "generate", bundle, "--prompt", "tead ", "--max-new-tokens", "12") == "in the class\n"
    assert json.loads(run(code, "inspect", bundle, "--json"))["target"]["vocabulary_size"] == 160
    assert json.loads(run(code, "bench", bundle, "--max-new-tokens", "4", "--json"))["prompts"] > 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "tead "}')
    evaluated = run(code, "evaluate", bundle, "--input", str(prompts), "--max-new-tokens", "12", "--json")
    assert json.loads(evaluated)["pooled"]["counts"]["rounds"] > 0


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Each name loads its module when it is first used."""
    code = """
import dspark.runtime

def loaded(*names):
    return set(names) & set(sys.modules)

others = ("onnxruntime", "jinja2", "tokenizers", "typer", "rich")
assert not loaded("numpy", "pydantic", *others), loaded("numpy", "pydantic", *others)
assert dspark.runtime.SamplingParams.__name__ == "SamplingParams"
assert not loaded(*others), loaded(*others)
named = [name for name in dspark.runtime.__all__ if name != "Priority"]  # a type alias
assert all(getattr(dspark.runtime, name).__name__ == name for name in named)
assert dspark.runtime.Priority
assert loaded(*others) == {"tokenizers"}, loaded(*others)
"""
    run(code)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match=r"'dspark\.runtime' has no attribute 'Nothing'"):
        _ = dspark.runtime.Nothing  # type: ignore[attr-defined]


def root(module: str) -> str:
    return ".".join(module.split(".")[:2]) if module.startswith("dspark") else module.partition(".")[0]


@pytest.mark.parametrize("package", [dspark.providers, dspark.runtime, dspark.configs], ids=list(ALLOWED))
def test_imports_point_one_way(package: object) -> None:
    name = package.__name__.removeprefix("dspark.")  # type: ignore[attr-defined]
    files = [file for folder in package.__path__ for file in Path(folder).rglob("*.py")]  # type: ignore[attr-defined]
    assert files
    allowed = {*sys.stdlib_module_names, f"dspark.{name}", *ALLOWED[name]}
    wrong = {f"{file.name}: {module}" for file in files for module in imports(file) if root(module) not in allowed}
    assert not wrong


FOLDERS = (
    "errors",
    "arguments",
    "bundle",
    "text",
    "decoding",
    "cache",
    "model",
    "costs",
    "scheduling",
    "engine",
    "loading",
    "prompts",
    "inference",
    "conversation",
    "rows",
    "reports",
    "measuring",
    "evaluation",
    "commands",
)
"""The runtime's folders and the modules beside them, from the ground up: each imports only what stands before it."""


def test_the_runtimes_folders_import_one_way() -> None:
    (top,) = map(Path, dspark.runtime.__path__)
    rooms = {path.stem for path in top.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(FOLDERS)
    for file in top.rglob("*.py"):
        if file == top / "__init__.py":  # the public face: it loads names on demand
            continue
        place = FOLDERS.index(file.relative_to(top).parts[0].removesuffix(".py"))
        for module in imports(file):
            if root(module) == "dspark.runtime" and module != "dspark.runtime":
                assert module.split(".")[2] in FOLDERS[: place + 1], f"{file.relative_to(top)} imports {module}"


def test_every_folder_is_described_and_installed() -> None:
    """A folder that ``pyproject.toml`` does not list would be missing from the wheel."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    for name in ("configs", "exporter", "providers", "runtime"):
        for init in (ROOT / name).rglob("__init__.py"):
            assert ".".join(("dspark", *init.parent.relative_to(ROOT).parts)) in described
            assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), f"{init} says nothing"


def test_what_the_exporter_reads_of_a_bundle_depends_on_little() -> None:
    """The manifest's schema is all that an exporter on another machine needs of the runtime."""
    (top,) = map(Path, dspark.runtime.__path__)
    allowed = (
        "dspark.providers.engine_key",
        "dspark.runtime.arguments",
        "dspark.runtime.bundle.",
        "dspark.runtime.errors",
    )
    for file in (top / "bundle").glob("*.py"):
        for module in imports(file):
            assert root(module) not in ("dspark.runtime", "dspark.providers") or module.startswith(allowed)


def test_modules_are_short() -> None:
    """A longer module says at its top why: ``Longer than 350 lines: …``."""
    for name in ("configs", "exporter", "providers", "runtime"):
        for file in (ROOT / name).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            assert len(text.splitlines()) <= 350 or "Longer than 350 lines" in text[:1000], file
