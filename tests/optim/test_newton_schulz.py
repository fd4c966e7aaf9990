import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from pliax.optim.newton_schulz import COEFFICIENTS, orthogonalize
from tests.optim import emulation


SHAPES = [(48, 20), (20, 48), (32, 32), (1, 7), (7, 1), (1, 1)]
sizes = st.sampled_from([1, 3, 8])
seeds = st.integers(0, 2**31)


jitted = jax.jit(orthogonalize)


def float64(x):
    return np.asarray(x, np.float64)


def scalar_iteration(s, steps=5):
    """What the iteration makes of one singular value."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_numpy_emulation(shape):
    G = emulation.well_conditioned(0, *shape)
    golden = emulation.newton_schulz(G, rounding=emulation.exactly)
    emulated = emulation.mean_error(emulation.newton_schulz(G), golden)
    assert emulation.mean_error(orthogonalize(jnp.asarray(G)), golden) <= (
        1.1 * emulated + np.finfo(np.float32).eps
    )


def test_rounds_less_than_the_plain_expressions():
    def plain(X):
        a, b, c = (jnp.bfloat16(value) for value in COEFFICIENTS)
        X = X.astype(jnp.bfloat16)
        X = X / jnp.linalg.norm(X)
        for _ in range(5):
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        return X

    G = emulation.well_conditioned(1, 64, 96)
    golden = emulation.newton_schulz(G, rounding=emulation.exactly)
    ours = emulation.mean_error(orthogonalize(jnp.asarray(G)), golden)
    assert 2 * ours < emulation.mean_error(plain(jnp.asarray(G)), golden)


@given(rows=sizes, columns=sizes, seed=seeds)
def test_transposition_equivariance(rows, columns, seed):
    G = emulation.well_conditioned(seed, rows, columns)
    X, Y = jitted(jnp.asarray(G)), jitted(jnp.asarray(G.T))
    if rows != columns:
        np.testing.assert_array_equal(X, Y.T)
    golden = emulation.newton_schulz(G, rounding=emulation.exactly)
    bound = 1.1 * emulation.mean_error(emulation.newton_schulz(G.T).T, golden)
    assert emulation.mean_error(Y.T, golden) <= bound + np.finfo(np.float32).eps


@given(rows=sizes, columns=sizes, seed=seeds, power=st.integers(-15, 60))
def test_scale_invariance(rows, columns, seed, power):
    G = jnp.asarray(emulation.well_conditioned(seed, rows, columns))
    np.testing.assert_array_equal(jitted(G * 2.0**power), jitted(G))


@given(rows=sizes, columns=sizes, seed=seeds)
def test_sign_flip_equivariance(rows, columns, seed):
    G = jnp.asarray(emulation.well_conditioned(seed, rows, columns))
    signs = jnp.where(
        jax.random.bernoulli(jax.random.key(seed), shape=(rows, 1)), 1, -1
    )
    flipped = jitted(G * signs.astype(jnp.float32))
    np.testing.assert_array_equal(flipped, jitted(G) * signs.astype(jnp.bfloat16))


@pytest.mark.parametrize("shape", [(64, 24), (24, 64), (40, 40)])
def test_singular_values_within_the_quintic_band(shape):
    G = emulation.well_conditioned(2, *shape, low=0.1)
    s = np.linalg.svd(float64(orthogonalize(jnp.asarray(G))), compute_uv=False)
    band = scalar_iteration(np.linspace(0.01, 1, 100_000))
    assert 0.65 < band.min() < band.max() < 1.25  # Jordan et al. 2024
    slack = 2.0**-7  # the rounding of X_5 moves a singular value less than this
    assert band.min() - slack < s.min()
    assert s.max() < band.max() + slack


def test_rank_deficient_keeps_the_null_space_small():
    G = emulation.well_conditioned(3, 40, 4) @ emulation.well_conditioned(4, 4, 40)
    s = np.linalg.svd(float64(orthogonalize(jnp.asarray(G))), compute_uv=False)
    emulated = np.linalg.svd(emulation.newton_schulz(G), compute_uv=False)
    assert (s[:4] > 0.65).all()
    assert (s[:4] < 1.25).all()
    assert s[4] < 1.5 * emulated[4]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_zero_stays_zero(dtype):
    X = orthogonalize(jnp.zeros((3, 5), dtype))
    assert X.dtype == jnp.bfloat16
    assert (X == 0).all()


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nonfinite_propagates(bad):
    assert jnp.isnan(orthogonalize(jnp.eye(4).at[1, 2].set(bad))).all()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_stays_empty(shape):
    assert orthogonalize(jnp.zeros(shape)).shape == shape


def test_eps_bounds_the_norm():
    G = jnp.asarray(emulation.well_conditioned(5, 4, 4))
    X = orthogonalize(G, eps=2.0**20, steps=0)
    np.testing.assert_array_equal(X * 2.0**20, G.astype(jnp.bfloat16))


@pytest.mark.parametrize("shape", SHAPES)
def test_jit_equals_eager(shape):
    G = jnp.asarray(emulation.well_conditioned(6, *shape))
    np.testing.assert_array_equal(jitted(G), orthogonalize(G))


def test_vmap_equals_loop():
    Gs = [emulation.well_conditioned(seed, 12, 8) for seed in range(3)]
    mapped = jax.vmap(orthogonalize)(jnp.asarray(np.stack(Gs)))
    for G, X in zip(Gs, mapped, strict=True):
        golden = emulation.newton_schulz(G, rounding=emulation.exactly)
        bound = 1.1 * emulation.mean_error(emulation.newton_schulz(G), golden)
        assert emulation.mean_error(X, golden) <= bound


@pytest.mark.parametrize("steps", [5, 5.0, np.float32(5), np.int64(5)])
def test_traced_and_float_steps_equal_static_steps(steps):
    G = jnp.asarray(emulation.well_conditioned(7, 8, 12))
    traced = jax.jit(lambda G, steps: orthogonalize(G, steps=steps))
    np.testing.assert_array_equal(traced(G, steps), orthogonalize(G))
    np.testing.assert_array_equal(orthogonalize(G, steps=steps), orthogonalize(G))


def test_default_matmul_precision_changes_nothing():
    def program():
        return jax.jit(orthogonalize).lower(jnp.ones((4, 6))).as_text()

    plain = program()
    for precision in ("bfloat16", "highest"):
        with jax.default_matmul_precision(precision):
            assert program() == plain


def test_every_rounding_reaches_the_compiler():
    text = str(jax.make_jaxpr(orthogonalize)(jnp.ones((4, 6))))
    assert text.count("reduce_precision") == 5  # G, X_0 and A, B, X of the loop
    assert text.count("dot_general") == 3


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [("x", "y"), (None, "x"), ("x", None)])
def test_sharded_equals_whole(axis_type, spec):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    G = jnp.asarray(emulation.well_conditioned(8, 32, 16))
    with jax.set_mesh(mesh):
        X = jax.jit(orthogonalize)(jax.device_put(G, sharding))
    if axis_type == "Explicit":
        assert X.sharding.is_equivalent_to(sharding, 2)
    golden = emulation.newton_schulz(np.asarray(G), rounding=emulation.exactly)
    bound = 1.1 * emulation.mean_error(emulation.newton_schulz(np.asarray(G)), golden)
    assert emulation.mean_error(X, golden) <= bound


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 100}, "Number of steps must be less than 100 for computational"),
        ({"steps": -1}, "Number of steps must be an integer >= 0 but is: -1"),
        ({"steps": 2.5}, "Number of steps must be an integer >= 0 but is: 2.5"),
        ({"steps": float("nan")}, "Number of steps must be an integer >= 0"),
        ({"steps": float("inf")}, "Number of steps must be an integer >= 0"),
        ({"steps": True}, "Number of steps must be an integer >= 0 but is: True"),
        ({"coefficients": (1.0, 2.0)}, "Coefficients must be a tuple of exactly 3"),
        ({"coefficients": (1.0,) * 4}, "Coefficients must be a tuple of exactly 3"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(jnp.eye(2), **arguments)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2)])
def test_only_matrices_are_taken(shape):
    with pytest.raises(ValueError, match="Input tensor gradient must be a 2D matrix"):
        orthogonalize(jnp.ones(shape))
