"""The house stands: floors point downwards, one door leads to JAX's interior."""

import ast
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parent.parent
MODULES = sorted((ROOT / "pliax").rglob("*.py"))
PRIVATE = ("jax._src", "jax.extend", "jax.interpreters")
FLOORS = {
    "core": {"core"},
    "transforms": {"core", "transforms"},
    "kernels": {"core", "kernels"},
    "distributed": {"core", "distributed"},
    "ragged": {"core", "ragged"},
    "optim": {"core", "kernels", "distributed", "optim"},
}


def imports(path):
    """Absolute names of everything a module imports."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_its_own_floor_and_those_below(path):
    parts = path.relative_to(ROOT / "pliax").parts
    allowed = FLOORS.get(parts[0], set(FLOORS))
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] == "pliax" and len(pieces) > 1 and pieces[1] in FLOORS:
            assert pieces[1] in allowed, name


def test_one_door_leads_to_the_interior_of_jax():
    guilty = {
        path.parent.relative_to(ROOT).as_posix()
        for path in MODULES
        if any(name.startswith(PRIVATE) for name in imports(path))
    }
    assert guilty == {"pliax/core/_jax"}


def test_import_linter_agrees():
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_no_function_hides_its_module():
    """A file is named by a noun, the function in it by a verb; two names are both."""
    both = {ROOT / "pliax" / "optim" / name for name in ("muon.py", "mup.py")}
    for path in set(MODULES) - both:
        nodes = ast.parse(path.read_text()).body
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert path.stem not in functions
