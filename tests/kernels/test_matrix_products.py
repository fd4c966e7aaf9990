"""Laws of Gram matrices and of products with an addend, fused or by XLA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_error_rule, equations, in_float64, normal
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax.test_util import check_grads

import pliax as px
from pliax.core.manual_axes import program_of_one_device
from pliax.kernels._backends import choose
from pliax.kernels.matrix_products import (
    add_matmul,
    backends,
    gram_is_fused,
    mosaic_gpu,
    schedules,
)
from pliax.kernels.matrix_products.backends import Arguments, Kind


symmetric_matmul = px.kernels.symmetric_matmul
FUSED = {"implementation": "mosaic_gpu", "kernel_options": {"interpret": 1}}
BF16 = jnp.bfloat16


def formula(X, C=None, alpha=1.0, beta=1.0, gamma=0.0):
    """As a user would write it, in the dtype of X."""
    XX = X @ X.mT
    alpha, beta, gamma = (
        jnp.broadcast_to(jnp.asarray(x, X.dtype), X.shape[:-2])[..., None, None]
        for x in (alpha, beta, gamma)
    )
    identity = jnp.broadcast_to(jnp.eye(XX.shape[-1], dtype=X.dtype), XX.shape)
    total = alpha * XX + gamma * identity
    return total if C is None else total + beta * C


def added(A, B, C, alpha=1.0, beta=1.0):
    alpha, beta = (jnp.asarray(x, A.dtype) for x in (alpha, beta))
    return alpha * (A @ B) + beta * C


def few_integers(seed, shape, dtype):
    """Of -1, 0 and 1: any machine adds their products exactly, in any order."""
    return jax.random.randint(jax.random.key(seed), shape, -1, 2).astype(dtype)


def assert_mirrored(actual):
    """One product is written to both sides, but of tiles on the diagonal.

    Those are products on either side, which a CPU may add up in another order.
    """
    tiles = np.arange(actual.shape[-1]) // schedules.TILE
    is_off = tiles[:, None] != tiles
    np.testing.assert_array_equal(actual[..., is_off], actual.mT[..., is_off])


# --- the meaning ----------------------------------------------------------------------


SIZES = {
    "stack": st.sampled_from([(), (1,), (3,), (2, 2)]),
    "rows": st.integers(1, 300),
    "depth": st.integers(1, 200),
}


@settings(max_examples=4)
@given(
    **SIZES,
    dtype=st.sampled_from([BF16, jnp.float16]),
    has_addend=st.booleans(),
    gamma=st.sampled_from([0.0, 3.4445]),
)
def test_the_fused_gram_matrix_is_as_exact_as_the_formula_and_mirrored(
    stack, rows, depth, dtype, has_addend, gamma
):
    X = (normal(0, (*stack, rows, depth)) / depth**0.5).astype(dtype)
    C = (
        formula((normal(1, (*stack, rows, 8)) / 3).astype(dtype))
        if has_addend
        else None
    )
    options = {"alpha": 2.0315, "beta": -4.775, "gamma": gamma}
    actual = symmetric_matmul(X, C, **options, **FUSED)
    assert_mirrored(actual)
    wanted = partial(formula, **options)
    golden = in_float64(wanted, X) if C is None else in_float64(wanted, X, C)
    assert_error_rule(actual, wanted(X, C), golden)


@settings(max_examples=4)
@given(
    **SIZES,
    dtype=st.sampled_from([BF16, jnp.float16]),
    options=st.sampled_from([{}, FUSED]),
)
def test_a_gram_matrix_is_symmetric_where_products_are_exact(
    stack, rows, depth, dtype, options
):
    X, Y = (few_integers(n, (*stack, rows, depth), dtype) for n in range(2))
    factors = {"alpha": 0.5, "beta": -2.0, "gamma": 3.0}
    C = formula(Y)
    actual = symmetric_matmul(X, C, **factors, **options)
    np.testing.assert_array_equal(actual, actual.mT)
    X, C = (x.astype(jnp.float32) for x in (X, C))
    np.testing.assert_array_equal(actual, formula(X, C, **factors).astype(dtype))


@settings(max_examples=4)
@given(**SIZES, options=st.sampled_from([{}, FUSED]))
def test_transpose_is_the_gram_matrix_of_the_transpose(stack, rows, depth, options):
    # In quarters, whose sums are exact: of others the last bit depends on their order.
    X = (jnp.round(2 * normal(0, (*stack, rows, depth))) / 4).astype(BF16)
    C = formula(X)
    np.testing.assert_array_equal(
        symmetric_matmul(X.mT, C, gamma=2.0, transpose=True, **options),
        symmetric_matmul(X, C, gamma=2.0, **options),
    )


def test_the_gradient_of_a_transposed_gram_matrix_is_that_of_the_formula():
    X, G = normal(0, (2, 5, 3)), normal(1, (2, 3, 3))

    def loss(gram, X):
        return jnp.vdot(G, gram(X))

    found = jax.grad(partial(loss, partial(symmetric_matmul, transpose=True)))(X)
    wanted = jax.grad(partial(loss, lambda X: X.mT @ X))(X)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=3)
@given(**SIZES, columns=st.sampled_from([1, 65, 256, 300, 512]))
def test_a_fused_product_with_an_addend_is_as_exact_as_the_formula(
    stack, rows, depth, columns
):
    A, B, C = (
        normal(n, (*stack, *sizes), BF16)
        for n, sizes in enumerate(((rows, depth), (depth, columns), (rows, columns)))
    )
    actual = add_matmul(A, B, C, alpha=0.5, beta=3.4445, **FUSED)
    wanted = partial(added, alpha=0.5, beta=3.4445)
    assert_error_rule(actual, wanted(A, B, C), in_float64(wanted, A, B, C))


def test_no_side_of_a_fused_product_is_shorter_than_a_tile(monkeypatch):
    seen = []

    class Seen(mosaic_gpu._Kernel):
        def __call__(self, *arrays):
            seen.extend(x.shape for x in arrays[:3] if x is not None)
            seen.append(arrays[-1])
            return super().__call__(*arrays)

    monkeypatch.setattr(mosaic_gpu, "_Kernel", Seen)
    A, B, C = (normal(n, (3, 60, 64), BF16) for n in range(3))
    actual = add_matmul(A, B.mT, C[:, :, :60], **FUSED)
    assert actual.shape == (3, 60, 60)
    assert seen and all(min(shape[1:]) >= schedules.TILE for shape in seen)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5, 128, 256), (9, 128, 128), (1, 72, 200)])
@pytest.mark.parametrize("transposed", [None, "left", "right"])
@pytest.mark.parametrize("has_addend", [True, False])
@pytest.mark.parametrize("K", [72, 192, 512])  # 2, 3 and 8 pieces
def test_the_last_round_in_quarters_is_exact(sizes, transposed, has_addend, K):
    (L, M, N), kind = sizes, Kind(False, transposed)
    A = normal(0, (L, K, M) if transposed == "left" else (L, M, K), BF16)
    B = normal(1, (L, N, K) if transposed == "right" else (L, K, N), BF16)
    C = normal(2, (L, M, N), BF16) if has_addend else None
    padded = N + -N % mosaic_gpu.DEPTH
    in_pairs = padded % (2 * schedules.TILE) == 0
    width, blocks = (2, 4) if in_pairs else (1, 8)
    width *= schedules.TILE
    schedule = schedules.rectangle(L, M, padded, width=width, blocks=blocks)
    assert schedule.quarters
    factors = jnp.tile(jnp.array([2.0, 3.0, 0.0]), (L, 1))
    actual = mosaic_gpu.add_product(A, B, C, factors, kind=kind, interpret=True)

    def wanted(*arrays):
        AB = 2 * jnp.matmul(*kind.factors(*arrays[:2]))
        return AB + 3 * arrays[2] if arrays[2:] else AB

    arrays = (A, B) if C is None else (A, B, C)
    assert_error_rule(actual, wanted(*arrays), in_float64(wanted, *arrays))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(6, 256), (3, 300)])
@pytest.mark.parametrize("transposed", [None, "left", "right"])
def test_both_sides_of_the_last_round_in_quarters_are_exact(sizes, transposed):
    L, M = sizes
    padded = M + -M % mosaic_gpu.DEPTH
    schedule = schedules.triangle(L, padded, blocks=8)
    cut = np.arange(schedule.whole, L * schedule.tiles) % schedule.tiles
    last = schedule.order[cut]
    assert any(row != column for row, column in last)
    kind = Kind(True, transposed)
    factors = jnp.tile(jnp.array([2.0, 0.0, 0.0]), (L, 1))

    def found(X):
        return mosaic_gpu.add_product(X, X, None, factors, kind=kind, interpret=True)

    def wanted(X):
        return 2 * jnp.matmul(*kind.factors(X, X))

    shape = (L, 72, M) if transposed == "left" else (L, M, 72)
    for X in (normal(0, shape, BF16), few_integers(0, shape, BF16)):
        if transposed is None:
            X = (X @ X.mT).astype(BF16)
        actual = found(X)
        assert_mirrored(actual)
        assert_error_rule(actual, wanted(X), in_float64(wanted, X))
    np.testing.assert_array_equal(actual, actual.mT)


def test_gradients_of_a_factor_that_is_the_addend():
    P, X = normal(0, (2, 4, 4)), normal(1, (2, 4, 6))
    G = normal(2, (2, 4, 6))

    def loss(add, P, X):
        return jnp.vdot(G, add(P, X))

    def fused(P, X):
        return add_matmul(P, X, X, beta=3.0)

    found = jax.grad(partial(loss, fused), (0, 1))(P, X)
    wanted = jax.grad(partial(loss, lambda P, X: P @ X + 3.0 * X), (0, 1))(P, X)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@given(
    **SIZES,
    dtype=st.sampled_from([BF16, jnp.float16, jnp.float32]),
    alpha=st.floats(-3, 3),
)
def test_xla_is_as_exact_as_the_formula(stack, rows, depth, dtype, alpha):
    X = (normal(0, (*stack, rows, depth)) / depth**0.5).astype(dtype)
    C = formula(X)
    actual = symmetric_matmul(X, C, alpha=alpha, beta=0.5, gamma=2.0)
    wanted = partial(formula, alpha=alpha, beta=0.5, gamma=2.0)
    assert actual.dtype == dtype
    assert_error_rule(actual, wanted(X, C), in_float64(wanted, X, C))


def test_of_commuting_symmetric_matrices_one_side_of_the_product_is_made():
    X = (normal(0, (2, 200, 64)) / 8).astype(BF16)
    A = symmetric_matmul(X, **FUSED)
    B = symmetric_matmul(A, A, alpha=0.3, beta=0.7, gamma=1.0, **FUSED)
    actual = add_matmul(A, B, commute=True, **FUSED)
    np.testing.assert_array_equal(actual[:, :128, 128:], actual[:, 128:, :128].mT)
    golden = in_float64(jnp.matmul, A, B)
    error = np.abs(np.asarray(actual, np.float64) - golden).mean()
    plain = np.abs(np.asarray(A @ B, np.float64) - golden).mean()
    assert error <= 1.5 * plain  # they commute up to rounding


@pytest.mark.parametrize("options", [{}, FUSED])
@pytest.mark.parametrize("gamma", [0.0, 5.0])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # some BLAS
def test_nothing_times_an_alpha_of_zero_is_zero(options, gamma):
    X = (1e25 * normal(0, (2, 128, 64))).astype(BF16)  # the products overflow
    C = formula(few_integers(1, (2, 128, 64), BF16))
    factors = {"alpha": jnp.array([0.0, 1e-30]), "beta": 2.0, "gamma": gamma}
    found = symmetric_matmul(X, C, **factors, **options)
    identity = jnp.eye(128, dtype=BF16)
    np.testing.assert_array_equal(found[0], 2 * C[0] + gamma * identity)
    assert jnp.isinf(found[1]).any()


@pytest.mark.parametrize("options", [{}, FUSED])
def test_each_matrix_may_have_its_own_factors(options):
    X = normal(0, (2, 3, 70, 64), BF16)
    alpha, gamma = jnp.arange(6.0).reshape(2, 3), jnp.full((2, 3), 2.0)
    actual = symmetric_matmul(X, alpha=alpha, gamma=gamma, **options)
    single = [
        symmetric_matmul(X[i], alpha=float(alpha[i]), gamma=2.0, **options)
        for i in np.ndindex(2, 3)
    ]
    np.testing.assert_array_equal(actual.reshape(6, 70, 70), single)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_what_is_empty_sums_to_nothing(shape):
    X, C = jnp.ones(shape), jnp.ones((*shape[:-1], shape[-2]))
    np.testing.assert_array_equal(
        symmetric_matmul(X, C, beta=2.0), formula(X, C, beta=2.0)
    )


def test_nan_stays_with_its_matrix_and_row():
    X = normal(0, (2, 130, 64), BF16).at[1, 5, 0].set(jnp.nan)
    is_nan = np.isnan(symmetric_matmul(X, **FUSED))
    expected = np.zeros((2, 130, 130), bool)
    expected[1, 5], expected[1, :, 5] = True, True
    np.testing.assert_array_equal(is_nan, expected)


# --- transformations ------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2.0, np.array([2.0, -1.0, 0.5])])
def test_derivatives_of_all_orders_and_modes(factor):
    with jax.enable_x64(True):
        X, C = normal(0, (3, 4, 5), jnp.float64), normal(1, (3, 4, 4), jnp.float64)

        def f(X, C, alpha, beta, gamma):
            return symmetric_matmul(X, C, alpha=alpha, beta=beta, gamma=gamma)

        def g(X, C, alpha, beta):
            X, C = jnp.asarray(X), jnp.asarray(C)  # check_grads passes NumPy's
            return add_matmul(X, X.mT, C, alpha=alpha, beta=beta)

        factors = (jnp.asarray(factor),) * 3
        check_grads(f, (X, C, *factors), order=2, modes=("fwd", "rev"))
        check_grads(g, (X, C, *factors[:2]), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("options", [{}, FUSED])
def test_gradients_are_those_of_the_formula(options):
    X, C = (normal(0, (2, 70, 64)) / 8).astype(BF16), normal(1, (2, 70, 70), BF16)
    weights = normal(2, (2, 70, 70))

    def loss(f, X, C, alpha):
        return jnp.sum(weights * f(X, C, alpha=alpha, gamma=1.0).astype(jnp.float32))

    def gradients(f, *args):
        return jax.grad(partial(loss, f), (0, 1, 2))(*args)

    args = X, C, jnp.float32(0.7)
    golden = in_float64(lambda *a: gradients(formula, *a), *args)
    ours, plain = (
        gradients(f, *args) for f in (partial(symmetric_matmul, **options), formula)
    )
    assert_error_rule(ours[:2], plain[:2], golden[:2])
    np.testing.assert_allclose(ours[2], golden[2], rtol=1e-2)


def test_the_gradient_of_a_gram_matrix_takes_one_product():
    def grad(X):
        return jax.vjp(symmetric_matmul, X)[1](jnp.ones((4, 4)))

    made = [x.primitive.name for x in equations(grad, jnp.ones((4, 5)))]
    assert made.count("dot_general") == 2  # with the Gram matrix


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_makes_a_larger_stack(axis, monkeypatch):
    seen, run = [], mosaic_gpu.add_product
    monkeypatch.setattr(
        mosaic_gpu,
        "add_product",
        lambda A, *rest, **kw: seen.append(A.shape) or run(A, *rest, **kw),
    )
    rows = 40 + axis  # so that none has been traced before
    X = jnp.moveaxis(normal(0, (2, 3, rows, 64), BF16), 0, axis)
    alpha = jnp.array([1.0, 2.0])

    def f(X, alpha):
        C = jnp.ones((3, rows, rows), BF16)
        return symmetric_matmul(X, C, alpha=alpha, **FUSED)

    mapped = jax.vmap(f, (axis, 0))(X, alpha)
    assert seen[-1] == (6, rows, 64)
    single = [f(jnp.take(X, n, axis), alpha[n]) for n in range(2)]
    np.testing.assert_array_equal(mapped, single)


@pytest.mark.parametrize("moving", ["C", "gamma"])
def test_gradients_of_what_is_whole_on_each_device(moving):
    auto, explicit = (
        jax.make_mesh((8,), ("x",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    X, C, gamma = normal(0, (8, 4, 5)), normal(1, (8, 4, 4)), jnp.ones(8)
    specs = P("x"), P(), P()

    def loss(value, X, others):
        found = symmetric_matmul(X, **(others | {moving: value}))
        return jnp.sum(found**2)

    def each(X, C, gamma):
        here = jax.lax.axis_index("x")
        whole = {"C": C, "gamma": gamma}
        mine = {name: x[here][None] for name, x in whole.items()}
        return jax.lax.psum(jax.grad(loss)(mine[moving], X, mine), "x")

    run = jax.shard_map(each, mesh=auto, in_specs=specs, out_specs=P())
    found = jax.jit(run)(X, C, gamma)
    with jax.set_mesh(explicit):
        on_mesh = jax.device_put(X, NamedSharding(explicit, P("x")))
        whole = {"C": C, "gamma": gamma}
        spread = jax.jit(jax.grad(loss))(whole[moving], on_mesh, whole)
    expected = jax.grad(loss)(whole[moving], X, whole)
    np.testing.assert_allclose(found[0], expected.sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(spread, expected, rtol=1e-4, atol=1e-4)


def test_vmap_over_nothing_makes_nothing():
    X = normal(0, (70, 64), BF16)
    found = jax.vmap(lambda a: symmetric_matmul(X, alpha=a, **FUSED))(jnp.ones(0))
    assert found.shape == (0, 70, 70)


@pytest.mark.parametrize("options", [{}, FUSED])
def test_an_infinite_shift_is_on_the_diagonal(options):
    found = symmetric_matmul(jnp.ones((70, 64), BF16), gamma=np.inf, **options)
    np.testing.assert_array_equal(np.isinf(found), np.eye(70, dtype=bool))


def test_factors_may_be_traced():
    X = normal(0, (2, 20, 8))
    jitted = jax.jit(lambda X, a: symmetric_matmul(X, X @ X.mT, beta=a))
    np.testing.assert_allclose(
        jitted(X, 3.0), formula(X, X @ X.mT, beta=3.0), rtol=1e-5, atol=1e-5
    )


# --- how the work is cut --------------------------------------------------------------


def work(schedule):
    """Matrix, tile, quarter of everything the thread blocks make, as the kernel does."""
    made = []
    for block in range(schedule.blocks):
        shares = [
            max(0, -(-(n - block) // schedule.blocks))
            for n in (schedule.whole, schedule.quarters)
        ]
        made += [
            (*divmod(block + n * schedule.blocks, schedule.tiles), quarter)
            for n in range(shares[0])
            for quarter in range(4)
        ]
        for n in range(shares[1]):
            unit = block + n * schedule.blocks
            tile = schedule.whole + unit // 4
            made.append((*divmod(tile, schedule.tiles), unit % 4))
    return made


@given(
    matrices=st.integers(1, 20),
    rows=st.integers(1, 2000),
    columns=st.integers(1, 2000),
    blocks=st.sampled_from([4, 66, 132]),
    is_symmetric=st.booleans(),
)
def test_every_tile_is_made_once(matrices, rows, columns, blocks, is_symmetric):
    m, n = (-(-x // schedules.TILE) for x in (rows, columns))
    schedule = schedules.rectangle(matrices, rows, columns, blocks=blocks)
    wanted = {(i, j) for i in range(m) for j in range(n)}
    if is_symmetric:
        schedule = schedules.triangle(matrices, rows, blocks)
        wanted = {(i, j) for i in range(m) for j in range(i + 1)}
    order = [tuple(x) for x in schedule.order.tolist()]
    assert len(order) == len(wanted) and set(order) == wanted
    made = work(schedule)
    assert len(made) == len(set(made)) == 4 * matrices * schedule.tiles
    busiest = matrices * schedule.tiles / blocks
    assert busiest <= schedule.rounds < busiest + 1


SHAPES = [(24, 896, 4864), (17, 512, 512), (1, 192, 64), (30, 512, 1376)]


KINDS = [
    Kind(True, "right", True),
    Kind(True, "left"),
    Kind(True),
    Kind(False),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SHAPES)
def test_all_kinds_are_compiled_for_a_gpu(kind, sizes):
    L, M, K = sizes
    X = (L, K, M) if kind.transposed == "left" else (L, M, K)
    given = [X, X, (L, M, M)] if kind.transposed else [(L, M, M)] * 3
    if not kind.is_symmetric:
        given = [(L, M, M), (L, M, K), (L, M, K)]
    arrays: list[Any] = [jax.ShapeDtypeStruct(x, BF16) for x in given]
    run = partial(mosaic_gpu.add_product, kind=kind, interpret=False)
    factors = jax.ShapeDtypeStruct((L, 3), jnp.float32)
    lowered = jax.jit(run).trace(*arrays, factors).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_a_kernel_with_and_without_a_factor_is_lowered_once():
    X = jax.ShapeDtypeStruct((3, 256, 256), BF16)
    factors = jax.ShapeDtypeStruct((3, 3), jnp.float32)

    def both(X, factors):
        kinds = (Kind(True, "right", has_scale=x) for x in (False, True))
        run = partial(mosaic_gpu.add_product, X, X, X, factors, interpret=False)
        return [run(kind=kind) for kind in kinds]

    lowered = jax.jit(both).trace(X, factors).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("call @_add_product") == 2
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


# --- which implementation -------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """As if the default device were one Hopper GPU; programs still run on the CPU."""
    monkeypatch.setattr(backends, "refused_device", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)


def chosen(shape, dtype=BF16, has_addend=False):
    X = jax.ShapeDtypeStruct(shape, dtype)
    C = X if has_addend else None
    arguments = Arguments((X, X, C), (), Kind(True, "right"), {})
    return choose("it", backends.BACKENDS, arguments, None).name


@pytest.mark.parametrize("shape", [(24, 896, 896), (896, 896), (20, 512, 512)])
def test_whether_a_gram_matrix_is_fused_is_what_is_chosen_for_it(shape, request):
    X = jax.ShapeDtypeStruct(shape, BF16)
    assert not gram_is_fused(X)
    request.getfixturevalue("hopper")
    assert gram_is_fused(X) == (chosen(shape) == "mosaic_gpu")
    assert not gram_is_fused(jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.usefixtures("hopper")
def test_the_fused_kernel_is_the_default_where_it_gains():
    assert chosen((24, 896, 4864)) == chosen((4096, 4096)) == "mosaic_gpu"
    assert chosen((896, 896)) == "xla"  # too few tiles
    assert chosen((24, 896, 128)) == chosen((24, 128, 896)) == "xla"
    assert chosen((24, 1216, 4864)) == chosen((24, 896, 832)) == "mosaic_gpu"
    assert chosen((24, 896, 1376)) == chosen((24, 900, 4864)) == "xla"
    assert chosen((24, 576, 4864)) == "xla"  # a fifth of the tiles is beyond it
    assert chosen((20, 512, 512)) == "xla"
    assert chosen((20, 512, 512), has_addend=True) == "mosaic_gpu"
    assert chosen((24, 896, 4864), jnp.float32) == "xla"
    # XLA's second kernel, which adds, takes as long as a small product.
    assert chosen((200, 128, 128)) == "xla"
    assert chosen((24, 384, 384)) == "xla"
    assert chosen((24, 384, 384), has_addend=True) == "mosaic_gpu"
    assert chosen((48, 128, 128), has_addend=True) == "xla"  # too few tiles
    assert chosen((400, 64, 64), has_addend=True) == "xla"


def test_a_program_of_one_device_of_several_takes_the_kernel(monkeypatch):
    monkeypatch.setattr(backends, "refused_device", lambda: None)
    assert jax.device_count() > 1
    assert chosen((24, 896, 4864)) == "xla"
    with program_of_one_device():
        assert chosen((24, 896, 4864)) == "mosaic_gpu"
    assert chosen((24, 896, 4864)) == "xla"


@pytest.mark.usefixtures("hopper")
def test_the_kernel_is_compiled_for_the_gpu_and_xla_for_the_cpu():
    X = jax.ShapeDtypeStruct((24, 896, 1024), BF16)
    traced = jax.jit(symmetric_matmul).trace(X)
    on_gpu, on_cpu = (
        traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")
    )
    assert "mosaic_gpu" in on_gpu and "mosaic_gpu" not in on_cpu


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", ["m, k", "1024, k", "b, 1024, 1024"])
def test_symbolic_sizes_go_to_xla(shape):
    X = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), BF16)
    exported = jax.export.export(jax.jit(symmetric_matmul), platforms=["cuda"])(X)
    assert "mosaic_gpu" not in str(exported.mlir_module())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("place", ["X", "alpha"])
def test_what_is_divided_or_explicit_goes_to_xla(place):
    auto, explicit = (
        jax.make_mesh((1,), ("x",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    X, alpha = normal(0, (24, 1024, 512), BF16), jnp.ones(24)
    specs = (P("x"), P()) if place == "X" else (P(), P("x"))

    def f(X, alpha):
        return symmetric_matmul(X, alpha=alpha)

    mapped = jax.shard_map(f, mesh=auto, in_specs=specs, out_specs=P("x"))
    lowered = jax.jit(mapped).trace(X, alpha).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" not in lowered.as_text()
    with jax.set_mesh(explicit):
        X, alpha = (
            jax.device_put(x, NamedSharding(explicit, spec))
            for x, spec in zip((X, alpha), specs, strict=True)
        )
        lowered = jax.jit(f).trace(X, alpha).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" not in lowered.as_text()


@pytest.mark.usefixtures("hopper")
def test_muon_takes_it():
    from pliax.optim.newton_schulz import choose_iteration

    X = jax.ShapeDtypeStruct((24, 896, 4864), BF16)
    for method, kernels in (("standard", 3), ("gram", 2)):
        iteration = choose_iteration(method=method)
        text = jax.jit(iteration).trace(X).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu") >= kernels


def test_a_name_never_falls_back():
    with pytest.raises(NotImplementedError, match=r"capability 9.0 \(H100, H200\)"):
        symmetric_matmul(jnp.ones((8, 8), BF16), implementation="mosaic_gpu")
    with pytest.raises(
        NotImplementedError, match="bfloat16 and float16, found float32"
    ):
        symmetric_matmul(jnp.ones((8, 8)), **FUSED)
    with pytest.raises(NotImplementedError, match="no tiles to make of"):
        symmetric_matmul(jnp.ones((8, 0), BF16), **FUSED)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="32 bits"):
        symmetric_matmul(jnp.ones((8, 8), BF16), **FUSED)
    with pytest.raises(NotImplementedError, match=r"capability 8\.0 .* found cpu"):
        symmetric_matmul(jnp.ones((8, 8), BF16), implementation="triton")
    with pytest.raises(ValueError, match="there is 'mosaic_gpu', 'xla', 'triton'"):
        symmetric_matmul(jnp.ones((8, 8)), implementation="cutlass")


def in_triton(shape):
    X = jax.ShapeDtypeStruct(shape, BF16)
    arguments = Arguments((X, X, None), (), Kind(True, "right"), {})
    return choose("it", backends.BACKENDS, arguments, "triton").name


def test_triton_says_what_it_lacks(monkeypatch):
    class Ampere:
        platform, compute_capability = "gpu", "8.0"

    monkeypatch.setattr(jax, "devices", lambda *_: [Ampere()])
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r'pip install "pliax\[triton\]"'):
        in_triton((8, 8))
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    assert in_triton((3, 8, 8)) == "triton"
    with pytest.raises(NotImplementedError, match=r"32 bits, found \(50000, 50000, 8"):
        in_triton((50_000, 8))
    monkeypatch.setattr(Ampere, "compute_capability", "7.5")
    with pytest.raises(NotImplementedError, match=r"8\.0 and newer, found 7\.5"):
        in_triton((8, 8))


def test_a_named_kernel_varies_as_its_operands_do():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    X = normal(0, (8, 128, 64), BF16)

    def mapped(out_specs):
        f = partial(symmetric_matmul, **FUSED)
        return jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out_specs)

    def loss(X):
        return mapped(P("x"))(X).astype(jnp.float32).sum()

    assert jax.eval_shape(jax.grad(loss), X).shape == X.shape
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(mapped(P()), X)


def test_explicit_axes_are_refused_by_a_named_kernel():
    with jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))):
        X = jax.device_put(normal(0, (8, 128, 64), BF16), P("x"))
        with pytest.raises(NotImplementedError, match="Explicit axes"):
            symmetric_matmul(X, **FUSED)


X = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("args", "options", "error", "text"),
    [
        ((X.astype(int),), {}, TypeError, "X must be a floating array, found int64"),
        (([[1.0]],), {}, TypeError, "X must be a floating array, found list"),
        ((X[0, 0],), {}, ValueError, r"must be matrices \[\*L, M, K\], found shape"),
        (
            (X, X),
            {},
            ValueError,
            r"wants C float32\[2, 3, 3\], found float32\[2, 3, 4\]",
        ),
        ((X, X[..., :3].astype(np.float16)), {}, ValueError, "found float16"),
        (
            (X,),
            {"alpha": np.ones(3)},
            ValueError,
            r"alpha must be .*\(2,\), found float64\[3\]",
        ),
        ((X,), {"alpha": [1.0, 2.0]}, ValueError, r"found \[1.0, 2.0\]"),
        ((X,), {"alpha": np.ones(2) * 1j}, ValueError, r"found complex128\[2\]"),
        ((X,), {"alpha": np.array("a")}, ValueError, "found <U1"),
        ((X,), {"beta": 1j}, ValueError, "beta must be a real number"),
        ((X,), {"gamma": "1"}, ValueError, "gamma must be a real number"),
        ((X,), {"kernel_options": 3}, TypeError, "a dict from names to integers"),
        ((X,), {"kernel_options": {"interpret": 0}}, ValueError, "at least 1"),
        ((X,), {"kernel_options": {"interpret": 1}}, ValueError, "which reads: none"),
        ((X,), {"precision": "best"}, ValueError, "Precision argument must be"),
    ],
)
def test_bad_input_is_refused(args, options, error, text):
    with pytest.raises(error, match=text):
        symmetric_matmul(*args, **options)
