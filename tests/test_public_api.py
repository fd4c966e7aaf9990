"""The names users write are frozen: adding or removing one is a decision."""

import inspect
import os
import subprocess
import sys
import types

import pytest

import pliax as px


NAMES = {
    px: {
        "AuxOutput", "AuxRequest", "BlockMask", "ConstraintViolationError", "Dim",
        "Generator", "GuardValidationError", "PaddingRefused", "RecompileLimitError", "and_masks", "check",
        "compile", "create_block_mask", "create_mask", "dynamic", "flex_attention",
        "guard_or_false", "guard_or_true", "maybe_dynamic", "noop_mask", "not_mask",
        "or_masks", "pad", "static", "statically_known_true", "sym_and", "sym_or",
        "infer_sizes", "validate_guards",
    },
    px.kernels: {
        "AuxOutput", "AuxRequest", "BlockMask", "PagedCache", "and_masks",
        "create_block_mask", "create_mask", "flex_attention", "noop_mask", "not_mask",
        "or_masks", "symmetric_matmul",
    },
    px.transforms: {
        "CompiledFunction", "GuardReport", "GuardValidationError", "PaddedFunction",
        "PaddingRefused", "RecompileLimitError", "SizeClass", "SizeClasses", "Stats",
        "compile", "infer_sizes", "pad", "validate_guards",
    },
    px.distributed: {"data_parallel_mesh", "distribute"},
    px.ragged: {"Ragged", "boolean_mask", "nonzero", "repeat", "unique"},
    px.optim: {"MatrixAxes", "labels", "muon", "mup", "scale_by_muon"},
}  # fmt: skip
NAMESPACES = {"core", "distributed", "kernels", "optim", "ragged", "transforms"}
NEVER_LOADED = (
    "flax", "optax", "orbax", "rich", "matplotlib", "scipy.sparse.csgraph", "z3",
    "jax._src.pallas.mosaic_gpu", "jax.experimental.pallas.mosaic_gpu",
)  # fmt: skip
LARGEST_SHARE = 0.4  # of what importing jax takes; 0.10 to 0.18, machines differ by 5


def public(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


@pytest.mark.parametrize("module", NAMES, ids=lambda module: module.__name__)
def test_public_names_are_the_frozen_ones(module):
    assert public(module) == NAMES[module]


def test_namespaces_are_the_rooms():
    rooms = {
        value.__name__
        for value in vars(px).values()
        if isinstance(value, types.ModuleType) and value.__name__.startswith("pliax.")
    }
    assert rooms - {"pliax.info"} == {f"pliax.{room}" for room in NAMESPACES}


def test_every_public_callable_is_documented():
    for module, names in NAMES.items():
        for name in names:
            assert getattr(module, name).__doc__, (module.__name__, name)


def test_compile_takes_nothing_as_static_and_donates_nothing_by_default():
    parameters = inspect.signature(px.compile).parameters
    names = ("dims", "dynamic", "donate_argnums", "static_argnames")
    assert [parameters[name].default for name in names] == [None, None, (), ()]


def python(code):
    command = [sys.executable, "-c", code]
    keeping = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # as an installed package is
    run = subprocess.run(
        command, check=True, capture_output=True, text=True, env=keeping
    )
    return run.stdout


def test_import_loads_nothing_heavy():
    code = "import sys, pliax; print([m for m in %r if m in sys.modules])"
    assert python(code % (NEVER_LOADED,)).strip() == "[]"


def test_a_kernel_loaded_later_has_nothing_compiled_again_beside_a_plugin(
    tmp_path, monkeypatch
):
    (tmp_path / "jax_plugins").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import jax, pliax; f = jax.jit(lambda x: x); f(1.0);"
        "import jax.experimental.pallas.mosaic_gpu; f(1.0); print(f._cache_size())"
    )
    assert python(code).strip() == "1"


def test_import_takes_little_beyond_jax():
    code = (
        "from time import process_time as now; start = now(); import jax;"
        "loaded = now(); import pliax; print((now() - loaded) / (loaded - start))"
    )
    # The least of several: other work on the machine only ever adds to it.
    assert any(float(python(code)) < LARGEST_SHARE for _ in range(6))
