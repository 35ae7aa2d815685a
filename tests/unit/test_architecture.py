"""What the parts may know of each other, and what a pytest process may load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardgauge.thresholds import read_thresholds

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardgauge"
# From the lowest to the highest; a module imports from its own layer and from lower ones only.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"boundary", "marked_yaml"}),
    frozenset({"presets"}),
    frozenset({"plan"}),
    frozenset({"spec"}),
    frozenset({"records", "quantities"}),
    frozenset({"evidence"}),
    frozenset({"entries", "verdict", "recorded"}),
    frozenset({"thresholds", "double_entry", "verdict_table"}),
    frozenset({"claims"}),
    frozenset({"curves"}),
    frozenset({"gauge"}),
)
FACES = ("plugin", "suite", "gauge_fixtures", "options", "cli", "__main__")
HEAVY = ("torch", "torch_npu", "hyper_parallel", "mindspore", "scipy", "numpy", "transformers")


# Every module outside the worker, by its name below the package.
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "worker"
}


def imports_of(path: Path, *, deferred: bool = True) -> set[str]:
    """Every module that a file imports, anywhere in it or at its top only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if deferred else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def claims_of(statement: ast.stmt) -> set[str]:
    """The claims that a function is marked with."""
    decorators = statement.decorator_list if isinstance(statement, ast.FunctionDef) else []
    calls = [
        call for call in decorators if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.claim"
    ]
    return {str(ast.literal_eval(call.args[0])) for call in calls}


def loaded_by_collection(*args: str) -> set[str]:
    """The modules of a pytest process that has collected this project's tests."""
    script = (
        "import sys, json, pytest\n"
        f"code = pytest.main(['--collect-only', '-q', *{list(args)!r}])\n"
        "print(json.dumps([int(code), sorted(sys.modules)]))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    code, names = json.loads(result.stdout.splitlines()[-1])
    assert code == 0, result.stdout
    return set(names)


def test_a_collecting_process_loads_no_torch() -> None:
    """A rank's crash can't take the verdicts with it, and collection stays quick: torch is the ranks' alone."""
    loaded = loaded_by_collection("tests/perf", "tests/correctness")
    assert not loaded & set(HEAVY)
    assert "shardgauge.worker" not in loaded
    assert "shardgauge.gauge" in loaded


def test_collecting_everything_loads_no_torch() -> None:
    """Unit tests of what the ranks do run in processes of their own."""
    assert "torch" not in loaded_by_collection("tests")


@pytest.mark.parametrize(("name", "path"), MODULES.items(), ids=MODULES)
def test_nothing_but_the_worker_imports_torch_or_the_worker(name: str, path: Path) -> None:
    """Not even in a function: the launcher starts the worker as a module, by name."""
    for imported in imports_of(path):
        assert imported.split(".")[0] not in ("torch", "torch_npu", "hyper_parallel", "mindspore"), name
        assert not imported.startswith("shardgauge.worker"), name


@pytest.mark.parametrize(("name", "path"), MODULES.items(), ids=MODULES)
def test_nothing_imports_a_face(name: str, path: Path) -> None:
    """Plugin and command line are ends; only a face may know another, and the live evidence its options."""
    faces = {f"shardgauge.{face}" for face in FACES}
    known = imports_of(path) & faces
    assert name in FACES or not known - {"shardgauge.options"}, known


def test_layers_import_downwards_only() -> None:
    """What decides stands on what is measured, never the other way round."""
    rank = {module: level for level, layer in enumerate(LAYERS) for module in layer}
    for module, level in rank.items():
        for imported in imports_of(PACKAGE / f"{module}.py"):
            if imported.startswith("shardgauge."):
                assert rank.get(imported.split(".")[1], len(LAYERS)) <= level, f"{module} imports {imported}"


@pytest.mark.parametrize(("name", "path"), MODULES.items(), ids=MODULES)
def test_statistics_are_imported_when_they_are_needed(name: str, path: Path) -> None:
    """Numbers in bulk (numpy, scipy) take longer to load than a recorded claim to decide."""
    assert not {imported.split(".")[0] for imported in imports_of(path, deferred=False)} & {"scipy", "numpy"}, name


def test_every_test_of_a_claim_says_its_sentence() -> None:
    """A test reads like the sentence that it stands for: its docstring begins with it, word for word."""
    sentences = {name: claim.sentence for name, claim in read_thresholds(ROOT / "thresholds.yaml").claims.items()}
    told = set()
    for path in (*(ROOT / "tests/perf").glob("test_*.py"), *(ROOT / "tests/correctness").glob("test_*.py")):
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            for claim in claims_of(function):
                paragraph = str(ast.get_docstring(function)).split("\n\n")[0]  # type: ignore[arg-type] # a function has one
                assert " ".join(paragraph.split()) == sentences[claim], f"{path.name}: {claim}"
                told.add(claim)
    assert told == set(sentences)


def test_every_claim_has_a_test_and_every_test_a_claim() -> None:
    """A run of everything checks both directions when it has collected, and ends with exit code 0 here."""
    assert "shardgauge.thresholds" in loaded_by_collection()
