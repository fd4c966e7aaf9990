from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_error_rule, equations
from hypothesis import given, settings, strategies as st

from pliax.kernels.look_ahead.api import squared
from pliax.optim import newton_schulz_methods
from pliax.optim.coefficients import COEFFICIENTS, NAMED_COEFFICIENTS
from pliax.optim.execution import choose_execution
from pliax.optim.matrix_axes import LAYOUTS
from pliax.optim.momentum import Momentum
from pliax.optim.newton_schulz import choose_iteration
from tests.optim import emulation


SHAPES = [(48, 20), (20, 48), (32, 32), (1, 7), (7, 1), (1, 1)]
sizes = st.sampled_from([1, 3, 8])
seeds = st.integers(0, 2**31)


def orthogonalize(G, **options):
    return choose_iteration(**options)(G)


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


# --- where the first step divides by the norms ----------------------------------------


def with_squares(G):
    X = G.astype(jnp.bfloat16)
    return X, jnp.sum(squared(X), axis=(1, 2))


def of_squares(G, **options):
    return choose_iteration(**options).of_squares(*with_squares(G))


jitted_of_squares = jax.jit(of_squares)


SCHEDULES = ["quintic", "polar_express", [(3.0, -4.0, 2.0), COEFFICIENTS]]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("coefficients", SCHEDULES)
@given(seed=seeds, magnitude=st.floats(-30, 17))
@settings(max_examples=5)
def test_the_first_step_may_divide_by_the_norm(shape, coefficients, seed, magnitude):
    many = [emulation.well_conditioned(seed + n, *shape) for n in range(32)]
    G = np.stack(many) * np.float32(10**magnitude)
    how = choose_iteration(coefficients)
    options = {"rounding": emulation.exactly, "coefficients": how.coefficients}
    golden = [emulation.newton_schulz(x, **options) for x in G]
    found = jax.jit(how.of_squares)(*with_squares(jnp.asarray(G)))
    assert_error_rule(found, jax.jit(how)(jnp.asarray(G)), np.stack(golden))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_of_a_stack_each_matrix_is_divided_by_its_norm(shape):
    magnitudes = [1e-3, 0, 1, 1e5, np.inf, 3e-20, np.nan, 3e19, 1e30, 7]
    G = [emulation.well_conditioned(n, *shape) for n in range(len(magnitudes))]
    G, magnitudes = jnp.asarray(np.stack(G)), jnp.asarray(magnitudes)
    usual = jnp.where(jnp.isfinite(magnitudes), magnitudes, 1.0)[:, None, None]
    G = (G * usual).at[:, 2, 3].multiply(magnitudes / usual[:, 0, 0])
    found, divided = (f(G) for f in (jitted_of_squares, jitted))
    np.testing.assert_array_equal(jnp.isnan(found), jnp.isnan(divided))
    np.testing.assert_array_equal(found == 0, divided == 0)
    for one, other in zip(found, divided, strict=True):
        np.testing.assert_allclose(float64(one), float64(other), atol=0.03)


@pytest.fixture
def fused(monkeypatch):
    """Programs as for stacks whose symmetric products are fused, by XLA's formula."""
    monkeypatch.setattr(newton_schulz_methods, "gram_is_fused", lambda X: True)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_products_that_share_a_kernel_are_the_same(shape, method, request):
    magnitudes = jnp.asarray([1e-3, 0, 1, 1e5, 3e-20, 3e19, 1e30, 7])[:, None, None]
    G = [emulation.well_conditioned(n, *shape) for n in range(len(magnitudes))]
    G = jnp.asarray(np.stack(G)) * magnitudes
    G = jnp.concatenate([G, G[:2].at[:, 1, 1].set(jnp.array([jnp.nan, jnp.inf]))])
    functions = of_squares, orthogonalize
    wanted = [jax.jit(lambda G, f=f: f(G, method=method))(G) for f in functions]
    request.getfixturevalue("fused")
    found = [jax.jit(lambda G, f=f: f(G, method=method))(G) for f in functions]
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(float64(x), float64(y))


def test_the_least_norm_may_be_an_array():
    G = jnp.asarray(emulation.well_conditioned(0, 16, 40))[None] * 1e-9
    eps = jnp.float32(1e-7)
    found = jax.jit(lambda G: of_squares(G, eps=eps))(G)
    np.testing.assert_array_equal(found, jitted_of_squares(G))
    traced = jax.jit(lambda G, eps: of_squares(G, eps=eps))(G, 1e-7)
    np.testing.assert_allclose(float64(traced), float64(jitted(G)), atol=0.01)


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"eps": 1e-12}, {"eps": 1e19}, {"method": "gram"}]
)
@pytest.mark.parametrize("size", [1e-15, 2.5e18])
def test_else_the_matrices_are_divided_first(options, size):
    G = jnp.asarray(emulation.well_conditioned(0, 16, 40))[None] * size
    found = of_squares(G, **options)
    np.testing.assert_array_equal(found, orthogonalize(G, **options))


def test_norms_whose_inverse_square_is_no_normal_number_are_overflows():
    G = jnp.asarray(emulation.well_conditioned(0, 16, 40))
    G = G / jnp.linalg.norm(G)
    fine, large = jitted_of_squares(jnp.stack([G * 9e18, G * 1.2e19]))
    assert (large == 0).all()
    np.testing.assert_allclose(float64(fine), float64(jitted(G)), atol=0.03)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_stays_empty(shape):
    assert orthogonalize(jnp.zeros(shape)).shape == shape


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_no_steps_divide_by_the_norm(method):
    G = jnp.asarray(emulation.well_conditioned(0, 4, 12))
    X = orthogonalize(G, steps=0, method=method, dtype=jnp.float32)
    np.testing.assert_allclose(X, G / jnp.linalg.norm(G), rtol=1e-6)


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


@pytest.fixture
def default_platform_alone(monkeypatch):
    """Programs as they are compiled for a CPU, without what a GPU would run."""

    def by_default(*args, default, **others):
        return default(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", by_default)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("default_platform_alone")
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
    how, execution = choose_iteration(), choose_execution("per_matrix", None, None)

    def run(G):  # without momentum
        axes, rule = [LAYOUTS["in_out"]], Momentum(0.0, nesterov=False)
        return execution([G], [jnp.zeros_like(G)], axes, how, rule)

    with jax.set_mesh(mesh):
        placed = jax.device_put(G, sharding)
        (X,), _ = jax.jit(run)(placed)
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
        ({"coefficients": ()}, "Coefficients must be a tuple of exactly 3 .* has 0"),
        ({"coefficients": ((1.0,) * 3, (1.0,))}, "Coefficients must be .* has 1"),
        ({"coefficients": "cubic"}, "no set named 'cubic'. Choose one of quintic, pol"),
        ({"method": "newton"}, "one of 'standard', 'gram' or a function, .* 'newton'"),
        (
            {"coefficients": 3.0},
            r"should be \(a, b, c\), one such triple for each step",
        ),
        ({"coefficients": ((1.0,) * 3, 4.0, 5.0)}, "Coefficients must be .* has 1"),
        ({"method": None}, "one of 'standard', 'gram' or a function, but is: None"),
        ({"dtype": jnp.int8}, "ns_dtype should be bfloat16 or float32 but is"),
        ({"dtype": jnp.float16}, "ns_dtype should be bfloat16 or float32 but is"),
        ({"dtype": "half a float"}, "ns_dtype should be bfloat16 or float32 but is"),
        ({"dtype": None}, "ns_dtype should be bfloat16 or float32 but is: None"),
        ({"dtype": "float64"}, r"is: 'float64' \(float64 needs jax_enable_x64\)"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(jnp.eye(2), **arguments)


# --- coefficients, methods, dtypes ----------------------------------------------------


def through(coefficients, s, steps):
    """What steps of any coefficients make of singular values."""
    for i in range(steps):
        a, b, c = coefficients[min(i, len(coefficients) - 1)]
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize(("steps", "low", "high"), [(5, 0.84, 1.13), (8, 0.999, 1.001)])
def test_polar_express_ends_in_the_published_band(steps, low, high):
    coefficients = NAMED_COEFFICIENTS["polar_express"]
    band = through(coefficients, np.geomspace(1e-3, 1, 100_000), steps)
    assert low < band.min() < band.max() < high  # Amsel et al. 2025
    G = emulation.well_conditioned(9, 24, 64, low=0.05)
    how = choose_iteration("polar_express", steps)
    s = np.linalg.svd(float64(how(jnp.asarray(G))), compute_uv=False)
    slack = 2.0**-6  # roundings of one step, doubled by the norm of 24 rows
    assert low - slack < s.min() < s.max() < high + slack


@given(rows=sizes, columns=sizes, seed=seeds, steps=st.integers(0, 9))
def test_coefficients_of_each_step_are_those_of_numpy(rows, columns, seed, steps):
    table = NAMED_COEFFICIENTS["polar_express"]
    G = emulation.well_conditioned(seed, rows, columns)
    expected = emulation.newton_schulz(G, 0, rounding=emulation.exactly)
    expected = expected if rows <= columns else expected.T
    for i in range(steps):
        a, b, c = table[min(i, len(table) - 1)]
        A = expected @ expected.T
        expected = a * expected + (b * A + c * A @ A) @ expected
    expected = expected if rows <= columns else expected.T
    with jax.enable_x64(True):
        how = choose_iteration("polar_express", steps, dtype=jnp.float64)
        got = jax.jit(how)(jnp.asarray(G, jnp.float64))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_a_name_is_its_coefficients():
    G = jnp.asarray(emulation.well_conditioned(1, 6, 9))
    np.testing.assert_array_equal(
        orthogonalize(G, coefficients="quintic"), orthogonalize(G)
    )
    for table in ([COEFFICIENTS, COEFFICIENTS], np.asarray([COEFFICIENTS] * 2)):
        np.testing.assert_array_equal(
            orthogonalize(G, coefficients=table), orthogonalize(G)
        )


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("steps", range(9))
def test_gram_is_the_same_polynomial(coefficients, steps):
    with jax.enable_x64(True):
        G = jnp.asarray([emulation.well_conditioned(i, 8, 24) for i in range(3)])
        standard, gram = (
            choose_iteration(coefficients, steps, method=method, dtype=jnp.float64)(G)
            for method in ("standard", "gram")
        )
    np.testing.assert_allclose(gram, standard, rtol=0, atol=1e-11)


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("low", [1e-3, 0.1])
def test_gram_errs_no_more_than_twice_the_standard_method(coefficients, low):
    G = emulation.well_conditioned(3, 64, 256, low=low)
    with jax.enable_x64(True):
        exact = choose_iteration(coefficients, dtype=jnp.float64)
        golden = np.asarray(exact(jnp.asarray(G, jnp.float64)))
    standard, gram = (
        emulation.mean_error(orthogonalize(jnp.asarray(G), **options), golden)
        for options in (
            {"coefficients": coefficients},
            {"coefficients": coefficients, "method": "gram"},
        )
    )
    assert gram <= 2 * standard


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (128, 128)])
def test_gram_by_the_fused_kernel_errs_no_more_than_twice_the_standard_method(
    shape, monkeypatch
):
    options = {"implementation": "mosaic_gpu", "kernel_options": {"interpret": 1}}
    for name in ("symmetric_matmul", "add_matmul"):
        run = partial(getattr(newton_schulz_methods, name), **options)
        monkeypatch.setattr(newton_schulz_methods, name, run)
    G = emulation.well_conditioned(3, *shape)
    golden = emulation.newton_schulz(G, rounding=emulation.exactly)
    plain = emulation.mean_error(emulation.newton_schulz(G), golden)
    standard, gram = (
        emulation.mean_error(orthogonalize(jnp.asarray(G), method=method), golden)
        for method in ("standard", "gram")
    )
    assert standard <= 1.1 * plain
    assert gram <= 2 * standard


@pytest.mark.usefixtures("default_platform_alone")
def test_gram_multiplies_by_the_wide_matrix_four_times():
    made = equations(choose_iteration(method="gram"), jnp.ones((4, 16)))
    products = [x for x in made if x.primitive.name == "dot_general"]
    wide = [x for x in products if x.outvars[0].aval.shape == (4, 16)]
    assert (len(products), len(wide)) == (18, 2)  # two more give [4, 4]


@pytest.mark.parametrize("steps", [2, 5])
def test_steps_unrolled_for_a_gpu_are_the_loop(steps, monkeypatch):
    G = jnp.asarray([emulation.well_conditioned(i, 4, 6) for i in range(3)])
    iteration = choose_iteration(steps=steps)
    looped = jax.jit(iteration)(G)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    unrolled = jax.jit(lambda G: iteration(G))
    assert "stablehlo.while" not in unrolled.lower(G).as_text()
    np.testing.assert_array_equal(unrolled(G), looped)


def test_gram_must_know_the_number_of_steps():
    def traced(steps):
        return choose_iteration(steps=steps, method="gram")(jnp.ones((2, 8)))

    with pytest.raises(ValueError, match=r"ns_steps is a traced value.*static_args"):
        jax.jit(traced)(5)


def test_a_method_of_ones_own():
    def cubic(X, how):
        for _ in range(how.steps):
            X = how.round(1.5 * X - 0.5 * X @ X.mT @ X)
        return X

    G = jnp.asarray(emulation.well_conditioned(4, 6, 10))
    X = choose_iteration(steps=12, method=cubic, dtype=jnp.float32)(G)
    np.testing.assert_allclose(X @ X.T, np.eye(6), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_errors_shrink_with_the_working_dtype(dtype):
    G = emulation.well_conditioned(5, 32, 48)
    golden = emulation.newton_schulz(G, rounding=emulation.exactly)
    X = orthogonalize(jnp.asarray(G), dtype=dtype)
    assert X.dtype == dtype
    bound = 60 * float(jnp.finfo(dtype).eps)
    assert np.abs(np.asarray(X, np.float64) - golden).max() < bound


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 8, 5), (1, 4, 4), (0, 4, 4)])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_stack_is_its_matrices(shape, method):
    G = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    got = orthogonalize(jnp.asarray(G), method=method)
    assert got.shape == shape
    for where in np.ndindex(shape[:-2]):
        alone = orthogonalize(jnp.asarray(G[where]), method=method)
        np.testing.assert_allclose(
            float64(got[where]), float64(alone), rtol=0, atol=2.0**-6
        )
