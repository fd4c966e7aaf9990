"""What the logs say is what .guards, .stats and .explain() say, as it happens."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import NamedSharding

import pliax as px


def counting(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture
def logged(caplog, monkeypatch):
    """What a call logs, by the name of the log."""
    monkeypatch.setattr(logging.getLogger("pliax"), "propagate", True)
    for name in ("guards", "recompiles", "dynamic"):
        caplog.set_level(logging.DEBUG, logger=f"pliax.{name}")

    def take(name):
        found = [r.getMessage() for r in caplog.records if r.name == f"pliax.{name}"]
        assert all(text.startswith("px.") for text in found)
        return [text.partition(": ")[2] for text in found]

    take.clear = caplog.clear
    return take


def branching(x, n):
    if x.shape[0] > 5:
        return x * 2
    return x + n


CALLS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 3), st.sampled_from([np.float32, np.int32])),
    min_size=1, max_size=6,
)  # fmt: skip


@given(calls=CALLS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
def test_each_guard_trace_and_compilation_is_told_once_with_its_reason(logged, calls):
    logged.clear()
    f = px.compile(branching)
    for size, n, dtype in calls:
        f(np.ones(size, dtype), n)
    assert sorted(logged("guards")) == sorted(map(str, f.guards))
    told = logged("recompiles")
    traces = [x.partition(": ")[2] for x in told if x.startswith("trace ")]
    compiled = [x for x in told if x.startswith("compilation")]
    assert (len(traces), len(compiled)) == (f.stats.traces, f.stats.compilations)
    assert traces[0] == "first call"
    report = f.explain()
    assert all(line in report for text in traces for line in text.split("\n  "))


def test_what_is_warm_logs_nothing(logged):
    f = px.compile(branching, dims={"x": "t"})
    for _ in range(2):
        f(counting(3), 2)
    logged.clear()
    f(counting(3), 2)
    assert [logged(name) for name in ("guards", "recompiles", "dynamic")] == [
        [],
        [],
        [],
    ]


def test_each_reason_of_a_compilation_is_named(logged):
    f = px.compile(lambda x: jax.tree.leaves(x)[0] * 2)
    x, weak = counting(3), 2.0
    for argument in (x, counting(4), x.astype(np.int32), [x], weak, jnp.float32(2)):
        f(argument)
    reasons = (
        "first call",
        "new size: `x`: f32[3] -> f32[4]",
        "new dtype: `x`: f32[3] -> i32[3]",
        "new structure: `x[0]` added\n  new structure: `x` removed",
        "new structure: ",  # back from the list to a scalar
        "new weak type: `x`: weak f32[] -> f32[]",
    )
    told = [text for text in logged("recompiles") if text.startswith("trace ")]
    for number, (text, reason) in enumerate(zip(told, reasons, strict=True), 1):
        assert text.startswith(f"trace {number}: {reason}")


@pytest.mark.parametrize(
    ("options", "calls", "wanted"),
    [
        ({}, [counting(3), counting(4)],
         "x.shape[0] = 4 is dynamic (s0): the size changed 3 -> 4"),
        ({}, [3, 4], "x = 4 is dynamic (s0 - 1): the Python integer changed 3 -> 4"),
        ({"dims": {"x": "t"}}, [counting(3)], "x.shape[0] = 3 is dynamic (t): declared by dims"),
        ({"dynamic": True}, [counting(3)], "x.shape[0] = 3 is dynamic (s0): dynamic=True"),
        ({}, [px.dynamic(counting(3), 0)],
         "x.shape[0] = 3 is dynamic (s0): marked by px.dynamic"),
        ({}, [px.maybe_dynamic(counting(3), 0)],
         "x.shape[0] = 3 is dynamic (s0): marked by px.maybe_dynamic"),
        ({"dynamic": True}, [px.static(counting(3))],
         "x.shape[0] = 3 is static: marked by px.static"),
        ({"dynamic": True}, [counting(0)],
         "x.shape[0] = 0 is static: an empty array is a case of its own"),
        ({"dynamic": True}, [2**31 - 1],
         "x = 2147483647 is static: it is too large for int32, in which sizes run"),
        ({"dims": {"x": "t"}}, [counting(8)],
         "t = 8 runs in the bucket of 9: growing by a quarter, without a max"),
        ({"dims": {"x": px.Dim("t", max=4)}}, [counting(3)],
         "t = 3 runs in the bucket of 3: geometric"),
        ({"dims": {"x": px.Dim("t", max=9, histogram={7: 1})}}, [counting(3)],
         "t = 3 runs in the bucket of 7: placed by the histogram"),
        ({"dims": {"x": px.Dim("t", buckets=[4])}}, [counting(3)],
         "t = 3 runs in the bucket of 4: of the list"),
        ({"dims": {"x": px.Dim("t", buckets=lambda n: 2 * n)}}, [counting(3)],
         "t = 3 runs in the bucket of 6: by the function"),
        ({"dims": {"x": px.Dim("t", buckets=None)}}, [counting(3)],
         "t = 3 runs in the bucket of 3: buckets=None"),
        ({"dims": {"x": px.Dim("t", buckets=[8], specialize_on=[lambda t: t == 9, lambda t: t == 3])}},
         [counting(3)], "t = 3 runs in the bucket of 3: specialize_on[1] holds"),
    ],
)  # fmt: skip
def test_each_decision_about_a_size_is_told_with_its_reason(
    logged, options, calls, wanted
):
    f = px.compile(lambda x: x - 1, **options)
    for x in calls:
        f(x)
    assert logged("dynamic").count(wanted) == 1


def test_a_size_that_stays_what_it_is_is_not_told_again(logged):
    f = px.compile(lambda x: x * len(x))
    for size in (3, 4, 5, 6):
        f(counting(size))
    told = [text for text in logged("dynamic") if " is dynamic " in text]
    assert told == ["x.shape[0] = 4 is dynamic (s0): the size changed 3 -> 4"]


def test_a_size_that_gives_way_is_told_with_its_line(logged):
    f = px.compile(lambda x, y: x[1:] * y * len(y), dynamic=True)
    f(counting(5), counting(4))
    again, *_ = [text for text in logged("dynamic") if "traced again" in text]
    assert "in test_a_size_that_gives_way" in again and "TypeError" in again
    constant, tied = logged("dynamic")[-2:]
    if "tied" in constant:
        constant, tied = tied, constant
    assert " became a constant: the program needs s1 == 4\n  at " in constant
    assert " became tied to another: the program needs s" in tied
    assert all("in test_a_size_that_gives_way" in text for text in (constant, tied))


def test_refusals_are_told_with_their_line(logged):
    def spectrum(x):
        return jnp.linalg.eigvalsh(x @ x.T)

    px.compile(spectrum, dims={"x": "t, _"})(np.sin(counting(3, 3)))
    (told,) = [x for x in logged("dynamic") if x.startswith("not padded: eigh")]
    assert told.endswith("spectrum: return jnp.linalg.eigvalsh(x @ x.T)")

    def first_half(x):
        return jnp.array_split(x, 2)[0]

    px.compile(first_half, dims={"x": "t"})(counting(3))
    (told,) = [x for x in logged("dynamic") if x.startswith("traced size by size")]
    assert told.endswith("first_half: return jnp.array_split(x, 2)[0]")


def test_sizes_divided_by_devices_are_told(logged, mesh_4x2):
    f = px.compile(lambda x: x * 2, dims={"x": "t"})
    f(jax.device_put(counting(8), NamedSharding(mesh_4x2, jax.P("x"))))
    assert "t = 8 runs in the bucket of 8: its axis is divided by devices" in logged(
        "dynamic"
    )


def test_an_executable_that_jax_builds_for_itself_is_told(logged):
    f = px.compile(lambda x: x * 2)
    f(counting(8))
    f(jax.device_put(counting(8), jax.devices()[1]))
    assert any("new sharding: `x`" in text for text in logged("recompiles"))
    assert f.stats.compilations == 2
