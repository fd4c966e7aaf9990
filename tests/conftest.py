"""Strict JAX for every test: 8 CPU devices, no promotion, checked annotations."""

import gc
import os
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import jax
import pytest
from annotations import check
from hypothesis import HealthCheck, settings


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Kernels in the interpreter of Mosaic GPU wait in threads of XLA, one a core otherwise.
os.environ.setdefault("PJRT_NPROC", "16")
# They run computations of their own, of which XLA lets 32 be in flight on a device
# (`max_inflight_computations_per_device`): with asynchronous dispatch what a test asks
# for meanwhile takes these places and waits for the kernel, and the kernel for a place.
jax.config.update("jax_cpu_enable_async_dispatch", False)
# Arrays of tests are small: LLVM's passes would take a third of the suite's time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Functions that a test makes anew are new to JAX, and their programs often are not: a
# worker, and every process that its tests start, compiles each program once.
_COMPILED = tempfile.TemporaryDirectory(prefix="pliax-tests-")
for name, value in {
    "jax_compilation_cache_dir": _COMPILED.name,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)

# Before pliax is first imported: every annotation of the package becomes a check.
check("pliax")

# Every trace that a test makes, here or in a process of its own, is proved: its guards
# imply all that it relied upon.
os.environ.setdefault("PLIAX_VALIDATE_GUARDS", "1")

_SLOW_BY_NATURE = [HealthCheck.too_slow, HealthCheck.differing_executors]
settings.register_profile(
    "ci", deadline=None, max_examples=10, suppress_health_check=_SLOW_BY_NATURE
)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    text = "run a fixed part of the tests, chosen by their names: one in so many"
    parser.addoption("--one-in", type=int, default=1, help=text)


_SLOW_CASES = 10  # of which a run of the suite takes one


def pytest_collection_modifyitems(config, items):
    parts = config.getoption("--one-in")
    kept = items if _asks_for_slow(config) else _without_most_slow_cases(items)
    kept = [x for x in kept if zlib.crc32(x.nodeid.encode()) % parts == 0]
    config.hook.pytest_deselected(items=[x for x in items if x not in set(kept)])
    items[:] = kept


def _asks_for_slow(config):
    """Whether all cases of slow laws run: `-m slow`, the thorough profile, or names."""
    marks = config.getoption("markexpr").replace("not slow", "")
    is_thorough = settings.get_current_profile_name() == "thorough"
    named = config.getoption("keyword") or any("::" in x for x in config.args)
    return (
        is_thorough or "slow" in marks or bool(named) or config.getoption("lf", False)
    )


def _law(item):
    return item.nodeid.partition("[")[0]


def _without_most_slow_cases(items):
    slow = [x for x in items if x.get_closest_marker("slow") is not None]
    counts, seen, kept = Counter(map(_law, slow)), Counter(), set(items) - set(slow)
    for item in slow:
        law = _law(item)
        n, first = seen[law], zlib.crc32(law.encode()) % min(counts[law], _SLOW_CASES)
        # Of neighbours another each time: parameters come again and again.
        if (n + n // _SLOW_CASES) % _SLOW_CASES == first:
            kept.add(item)
        seen[law] += 1
    return [x for x in items if x in kept]


# Linux allows a process 65,530 mappings of memory, and an executable takes a few: a
# worker that keeps all of its tests' dies where the next one cannot be mapped.
_MANY_MAPPINGS = 20_000
_MAPPINGS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def few_executables():
    yield
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def standard_promotion():
    """For calls into optax: optax 0.2.8 mixes dtypes and fails under strict."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.fixture
def mesh_4x2():
    """The 8 simulated devices as a 4 x 2 mesh with Auto axes."""
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(auto, auto))
