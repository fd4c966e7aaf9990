"""Laws of momentum, whose look-ahead is rounded and stacked in the same pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_error_rule,
    compilations,
    equations,
    in_float64,
    normal,
)

from pliax.kernels import look_ahead
from pliax.kernels.look_ahead import api


COUNTS = (1, 3, 1, 2, 1)  # matrices of each array: more than one kernel takes
SIDES = (64, 96)


def operands(nesterov=True, counts=COUNTS, sides=SIDES, interpret=True):
    factors = jnp.array([0.05, 0.95])
    gradients = [normal(i, (n, *sides)) for i, n in enumerate(counts)]
    momenta = [normal(99 + i, (n, *sides)) for i, n in enumerate(counts)]
    return api.Static(sides, nesterov, interpret), (factors, gradients, momenta)


def formula(nesterov):
    def plain(factors, gradients, momenta):
        pairs = list(zip(gradients, momenta, strict=True))
        buffers = [factors[0] * G + factors[1] * M for G, M in pairs]
        ahead = buffers
        if nesterov:
            pairs = zip(gradients, buffers, strict=True)
            ahead = [factors[0] * G + factors[1] * M for G, M in pairs]
        X = jnp.concatenate(ahead)
        rounded = X.astype(jnp.bfloat16) if X.dtype == jnp.float32 else X
        wide = rounded.astype(X.dtype)
        return buffers, rounded, jnp.sum(wide * wide, axis=(1, 2))

    return plain


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("interpret", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_one_pass_is_the_formula(nesterov, interpret, jit):
    static, arrays = operands(nesterov, interpret=interpret)

    def run(*arrays):
        return look_ahead.stacked(static, *arrays)

    actual = (jax.jit(run) if jit else run)(*arrays)
    plain = formula(nesterov)
    assert_error_rule(actual, plain(*arrays), in_float64(plain, *arrays))


def test_places_are_those_of_the_arrays_and_nothing_else_is_written():
    static, (factors, gradients, momenta) = operands()
    gradients[1] = gradients[1].at[2].set(jnp.nan)
    _, X, squares = look_ahead.stacked(static, factors, gradients, momenta)
    poisoned = np.isnan(np.asarray(X, np.float32)).all((1, 2))
    assert poisoned.tolist() == np.isnan(squares).tolist() == [i == 3 for i in range(8)]
    assert not np.isnan(np.asarray(X, np.float32)[~poisoned]).any()


@pytest.mark.parametrize("interpret", [True, False])
def test_a_sum_that_overflows_is_infinite_and_that_of_an_infinity_is_nan(interpret):
    static, (factors, gradients, momenta) = operands(interpret=interpret)
    gradients[0] = gradients[0].at[0, 3, 5].set(3e22)
    gradients[1] = gradients[1].at[1, 4, 7].set(-jnp.inf)
    _, _, squares = look_ahead.stacked(static, factors, gradients, momenta)
    assert np.isposinf(squares).tolist() == [i == 0 for i in range(8)]
    assert np.isnan(squares).tolist() == [i == 2 for i in range(8)]


def test_eager_calls_compile_once():
    static, arrays = operands(interpret=False, sides=(64, 160))
    look_ahead.stacked(static, *arrays)
    with compilations() as built:
        look_ahead.stacked(static, *arrays)
    assert not built


def test_what_is_mapped_is_the_formula_of_each():
    static, (factors, *rest) = operands()
    doubled = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), rest)

    def run(*arrays):
        return look_ahead.stacked(static, factors, *arrays)

    many = jax.vmap(run)(*doubled)
    for i in range(2):
        one = run(*jax.tree.map(lambda x, i=i: x[i], doubled))
        gap = jax.tree.map(lambda x, y, i=i: jnp.abs(x[i] - y).max(), many, one)
        assert max(map(float, jax.tree.leaves(gap[0]))) < 1e-6
        np.testing.assert_allclose(many[2][i], one[2], rtol=1e-3)


def test_derivatives_are_those_of_the_formula():
    static, arrays = operands()
    tangents = jax.tree.map(jnp.ones_like, arrays)

    def run(*arrays):
        return look_ahead.stacked(static, *arrays)

    actual, plain = (jax.jvp(f, arrays, tangents)[1] for f in (run, formula(True)))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2
        )


def test_arrays_of_the_same_shapes_are_one_kernel():
    static, arrays = operands(counts=(1,) * 13)
    made = equations(lambda *arrays: look_ahead.stacked(static, *arrays), *arrays)
    calls = [x.params["jaxpr"] for x in made if x.params.get("name") == "_write"]
    assert len(calls) == 4 and len(set(map(id, calls))) == 2


def program_for_a_gpu(counts, nesterov=True):
    static = api.Static((896, 4864), nesterov)
    matrices = [jax.ShapeDtypeStruct((n, *static.sides), jnp.float32) for n in counts]
    run = jax.jit(lambda *arrays: look_ahead.stacked(static, *arrays))
    factors = jax.ShapeDtypeStruct((2,), jnp.float32)
    traced = run.trace(factors, matrices, matrices)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("counts", [COUNTS, (1,) * 9])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_compiled_for_a_gpu(counts, nesterov):
    assert "mosaic_gpu" in program_for_a_gpu(counts, nesterov)


def test_more_than_32_bits_count_is_left_to_xla():
    most = api._LARGEST // (896 * 4864)
    assert "mosaic_gpu" in program_for_a_gpu((most - 1, 1))
    assert "mosaic_gpu" not in program_for_a_gpu((most, 1))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(api, "refused_device", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)


def refused(sides=SIDES, dtype=jnp.float32, count=1, other=None):
    x, M = (jax.ShapeDtypeStruct((n, *sides), dtype) for n in (count, other or count))
    return look_ahead.refused(x, M, sides) or ""


@pytest.mark.usefixtures("hopper")
def test_it_serves_whole_blocks_of_float32_on_one_hopper_gpu(mesh_4x2):
    assert not refused()
    assert "float32 alone" in refused(dtype=jnp.bfloat16)
    assert "blocks of 2048" in refused((64, 95))
    assert "blocks of 2048" in refused((0, 95))
    assert "blocks of 2048" in refused(count=0)
    assert "another shape" in refused(other=2)
    assert "known sizes" in refused(jax.export.symbolic_shape("m, 2048*n"))
    explicit = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Explicit,))
    x = jax.device_put(jnp.zeros((1, *SIDES)), jax.NamedSharding(explicit, jax.P()))
    assert "partition" in (look_ahead.refused(x, x, SIDES) or "")


def test_it_is_refused_on_a_cpu():
    assert "compute capability" in refused()
