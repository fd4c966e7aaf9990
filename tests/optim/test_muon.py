import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, strategies as st

import pliax as px
from tests.optim import emulation


SHAPES = {"tall": (48, 20), "wide": (20, 48), "square": (32, 32)}
LAYOUTS = ("in_out", "out_in")
RATE = 0.02


def gradients(shape, steps=6, low=0.3):
    """One well-conditioned matrix and small noise, so that averages are so too."""
    mean = emulation.well_conditioned(0, *shape, low=low)
    noise = np.random.default_rng(1).standard_normal((steps, *shape)) * 0.01
    return [(mean + part).astype(np.float32) for part in noise]


def weights(shape):
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def train(tx, params, grads):
    """The parameters after one jitted step per gradient tree."""

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for grad in grads:
        params, state = step(params, state, jax.tree.map(jnp.asarray, grad))
    return params


def tree(dtype=jnp.float32):
    return {
        name: jnp.asarray(emulation.well_conditioned(seed, *shape), dtype)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("adjust_lr_fn", emulation.ADJUST_LR_FNS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_numpy_emulation(shape, adjust_lr_fn, layout):
    options = {"learning_rate": RATE, "adjust_lr_fn": adjust_lr_fn, "layout": layout}
    W, grads = weights(shape), gradients(shape)
    golden = emulation.muon(W, grads, rounding=emulation.exactly, **options)
    emulated = emulation.mean_error(emulation.muon(W, grads, **options), golden)
    actual = train(px.optim.muon(**options), jnp.asarray(W), grads)
    assert emulation.mean_error(actual, golden) <= 1.1 * emulated


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_equals_numpy_emulation_for_each_momentum(momentum, nesterov):
    options = {"learning_rate": RATE, "momentum": momentum, "nesterov": nesterov}
    W, grads = weights((24, 16)), gradients((24, 16))
    golden = emulation.muon(W, grads, rounding=emulation.exactly, **options)
    emulated = emulation.mean_error(emulation.muon(W, grads, **options), golden)
    actual = train(px.optim.muon(**options), jnp.asarray(W), grads)
    assert emulation.mean_error(actual, golden) <= 1.1 * emulated


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nearly_rank_deficient_gradients_stay_in_the_band(shape):
    thin = emulation.well_conditioned(3, shape[0], 4)
    grads = [thin @ emulation.well_conditioned(4, 4, shape[1])] * 6
    tx = px.optim.muon(1.0, 0.0)
    moved = train(tx, jnp.zeros(shape), grads) / 6
    ratio = emulation.ratio(shape, None, "in_out")
    s = np.linalg.svd(np.asarray(moved, np.float64), compute_uv=False) / ratio
    assert (s[:4] > 0.65).all()
    assert (s[:4] < 1.25).all()


@given(mu=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_momentum_is_an_exponential_average_without_bias_correction(mu, seed):
    tx = px.optim.scale_by_muon(momentum=mu)
    grads = [emulation.well_conditioned(seed + i, 3, 5) for i in range(3)]
    state: Any = tx.init(jnp.zeros((3, 5)))
    expected = np.zeros((3, 5))
    for G in grads:
        _, state = tx.update(jnp.asarray(G), state)
        expected = mu * expected + (1 - mu) * G.astype(np.float64)
    ulp = np.finfo(np.float32).eps * np.abs(grads).max()
    np.testing.assert_allclose(state.momentum, expected, rtol=0, atol=4 * ulp)


def test_weight_decay_is_decoupled_and_unadjusted():
    W = weights((4, 16))
    tx = px.optim.muon(RATE, 0.3, adjust_lr_fn="match_rms_adamw")
    updates, _ = jax.jit(tx.update)(jnp.zeros((4, 16)), tx.init(W), jnp.asarray(W))
    np.testing.assert_allclose(updates, -RATE * 0.3 * W, rtol=1e-6)


def test_without_decay_the_parameters_are_not_needed():
    tx = px.optim.muon(RATE, weight_decay=0)
    updates, _ = jax.jit(tx.update)(jnp.eye(3), tx.init(jnp.eye(3)))
    assert updates.shape == (3, 3)


def test_decay_without_parameters_is_refused():
    tx = px.optim.muon(RATE)
    with pytest.raises(ValueError, match="weight decay needs the parameters"):
        jax.jit(tx.update)(jnp.eye(3), tx.init(jnp.eye(3)))


@pytest.mark.parametrize("adjust_lr_fn", ["original", "spectral_unclamped"])
@pytest.mark.parametrize("shape", [(48, 20), (20, 48)])
def test_layouts_are_transposes_of_each_other(shape, adjust_lr_fn):
    G = jnp.asarray(emulation.well_conditioned(5, *shape))
    ours, torchs = (
        px.optim.scale_by_muon(adjust_lr_fn=adjust_lr_fn, layout=layout)
        for layout in LAYOUTS
    )
    pairs = [(ours, G), (torchs, G.T)]
    factor = emulation.ratio(shape, adjust_lr_fn, "in_out")
    for tx, matrix in pairs:
        X, _ = jax.jit(tx.update)(matrix, tx.init(matrix))
        raw = np.asarray(matrix)
        golden = emulation.newton_schulz(raw, rounding=emulation.exactly)
        emulated = emulation.mean_error(emulation.newton_schulz(raw), golden)
        assert emulation.mean_error(X / factor, golden) <= 1.1 * emulated


def test_original_is_the_default_and_depends_on_the_layout():
    G = jnp.eye(4, 16)
    state = px.optim.scale_by_muon().init(G)
    wide, tall = (
        jnp.asarray(px.optim.scale_by_muon(layout=layout).update(G, state)[0])
        for layout in LAYOUTS
    )
    np.testing.assert_array_equal(wide, 2 * tall)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_of_updates_and_state(dtype):
    params = tree(dtype)
    for rate in (RATE, jnp.float32(RATE), lambda count: RATE):
        tx = px.optim.muon(rate, jnp.float32(0.1))
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
        for leaf in jax.tree.leaves((updates, state[0].momentum)):
            assert leaf.dtype == dtype


def test_float64_keeps_its_momentum():
    with jax.enable_x64(True):
        W, G = jnp.ones((3, 4), jnp.float64), jnp.full((3, 4), 1 / 3, jnp.float64)
        tx = px.optim.muon(RATE)
        updates, state = jax.jit(tx.update)(G, tx.init(W), W)
        assert updates.dtype == jnp.float64
        np.testing.assert_allclose(state[0].momentum, 0.05 / 3, rtol=1e-15)


def test_bfloat16_momentum_is_rounded_once():
    G = jnp.asarray(emulation.well_conditioned(6, 4, 6), jnp.bfloat16)
    tx = px.optim.scale_by_muon()
    state = jax.jit(tx.update)(G, tx.init(G))[1]
    _, state = jax.jit(tx.update)(G, state)
    G = np.asarray(G, np.float32)
    expected = emulation.bfloat16(np.float32(0.05) * G)
    expected = emulation.bfloat16(np.float32(0.95) * expected + np.float32(0.05) * G)
    np.testing.assert_array_equal(np.asarray(state.momentum, np.float32), expected)


def test_gradient_of_another_dtype_than_the_parameter():
    params = tree()
    tx = px.optim.muon(RATE)
    grads = jax.tree.map(lambda G: G.astype(jnp.bfloat16), params)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert updates["tall"].dtype == jnp.bfloat16
    assert state[0].momentum["tall"].dtype == jnp.float32


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_zero_gradients_leave_only_decay(decay):
    params = tree()
    tx = px.optim.muon(RATE, decay)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    for W, U in zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True):
        np.testing.assert_allclose(U, -RATE * decay * W, rtol=1e-6)


def test_nan_gradients_propagate_to_their_matrix_only():
    params = tree()
    tx = px.optim.muon(RATE)
    grads = {**params, "tall": params["tall"].at[0, 0].set(jnp.nan)}
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert jnp.isnan(updates["tall"]).all()
    assert jnp.isfinite(updates["wide"]).all()


def test_jit_equals_eager():
    params = tree()
    tx = px.optim.muon(RATE)
    state = tx.init(params)
    eager: Any = tx.update(params, state, params)[0]
    jitted: Any = jax.jit(tx.update)(params, state, params)[0]
    for name, G in params.items():
        W = np.asarray(G)
        golden = emulation.muon(W, [W], rounding=emulation.exactly, learning_rate=RATE)
        errors = [emulation.mean_error(G + U[name], golden) for U in (eager, jitted)]
        assert max(errors) <= 1.1 * min(errors)


def test_a_second_step_does_not_recompile():
    params = tree()
    tx = px.optim.muon(optax.constant_schedule(RATE))
    step: Any = jax.jit(tx.update)
    state = tx.init(params)
    for _ in range(3):
        _, state = step(params, state, params)
    assert step._cache_size() == 1


def test_donated_state_and_parameters():
    params = tree()
    tx = px.optim.muon(RATE)
    expected = optax.apply_updates(
        params, jax.jit(tx.update)(params, tx.init(params), params)[0]
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = jax.jit(tx.update)(grads, state, params)
        return optax.apply_updates(params, updates), state

    moved, _ = step(tree(), tx.init(params), params)
    assert_close(moved, expected)


def assert_close(actual, expected):
    """Equal but for a last place of the bfloat16 Newton-Schulz result."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=RATE * 2.0**-7),
        actual,
        expected,
    )


def test_schedules_count_from_zero():
    seen = px.optim.muon(lambda count: jnp.where(count < 1, 0.0, 1.0), weight_decay=0)
    G = jnp.eye(3)
    first, state = jax.jit(seen.update)(G, seen.init(G))
    second, state = jax.jit(seen.update)(G, state)
    assert not first.any()
    assert second.any()
    assert state[1].count == 2


def test_learning_rate_may_be_a_one_element_array():
    G = jnp.eye(3)
    plain, array = (
        px.optim.muon(rate).update(G, px.optim.muon().init(G), G)[0]
        for rate in (RATE, jnp.full((1,), RATE))
    )
    np.testing.assert_array_equal(plain, array)


@pytest.mark.usefixtures("standard_promotion")
def test_inject_hyperparams():
    params = tree()
    tx = optax.inject_hyperparams(px.optim.muon)(learning_rate=RATE)
    update = jax.jit(tx.update)
    updates, state = update(params, tx.init(params), params)
    plain = px.optim.muon(RATE)
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    assert_close(updates, expected)
    state.hyperparams["learning_rate"] = jnp.zeros(())
    updates, _ = update(params, state, params)
    assert not any(U.any() for U in jax.tree.leaves(updates))


@pytest.mark.usefixtures("standard_promotion")
def test_inject_hyperparams_keeps_bfloat16():
    params = {"low": jnp.eye(4, dtype=jnp.bfloat16), "high": jnp.eye(4)}
    tx = optax.inject_hyperparams(px.optim.muon)(learning_rate=RATE)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["low"].dtype == jnp.bfloat16
    assert updates["high"].dtype == jnp.float32


@pytest.mark.usefixtures("standard_promotion")
def test_inject_hyperparams_with_a_schedule():
    params = tree()
    tx = optax.inject_hyperparams(px.optim.muon)(optax.linear_schedule(0.0, 1.0, 10))
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert not updates["tall"].any()
    updates, _ = jax.jit(tx.update)(params, state, params)
    assert updates["tall"].any()


@pytest.mark.usefixtures("standard_promotion")
def test_partition_of_a_tree_is_the_partition_of_updates():
    matrices = tree()
    params = {"blocks": {"up": matrices["wide"]}, "wte": matrices["tall"]}
    parts: Any = {"muon": px.optim.muon(RATE), "adamw": optax.adamw(RATE)}
    tx = optax.partition(parts, px.optim.labels)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    for name, path in {"muon": "blocks", "adamw": "wte"}.items():
        part = {path: params[path]}
        alone, _ = parts[name].update(part, parts[name].init(part), part)
        assert_close(updates[path], alone[path])


@pytest.mark.usefixtures("standard_promotion")
def test_masked_leaves_pass_through():
    params = {**tree(), "bias": jnp.ones(3)}
    mask = {name: name != "bias" for name in params}
    tx = optax.masked(px.optim.muon(RATE), mask)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["bias"], params["bias"])
    assert (updates["tall"] != params["tall"]).any()


@pytest.mark.usefixtures("standard_promotion")
def test_multi_steps_average_the_gradients():
    params = tree()
    tx = optax.MultiSteps(px.optim.muon(RATE), every_k_schedule=2)
    update, state = jax.jit(tx.update), tx.init(params)
    updates, state = update(params, state, params)
    assert not updates["tall"].any()
    updates, state = update(params, state, params)
    plain = px.optim.muon(RATE)
    assert_close(updates, jax.jit(plain.update)(params, plain.init(params), params)[0])


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_parameters_equal_whole_ones(axis_type, layout):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    params, tx = tree(), px.optim.muon(RATE, layout=layout)
    expected, _ = jax.jit(tx.update)(params, tx.init(params), params)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, jax.NamedSharding(mesh, jax.P("x", "y")))
        state: Any = tx.init(placed)
        assert state[0].momentum["tall"].sharding == placed["tall"].sharding
        updates, _ = jax.jit(tx.update)(placed, state, placed)
    assert_close(updates, expected)


def test_eval_shape_of_the_state():
    params = tree()
    state = jax.eval_shape(px.optim.muon().init, params)
    shapes = jax.tree.map(jnp.shape, state[0].momentum)
    assert shapes == jax.tree.map(jnp.shape, params)


@pytest.mark.usefixtures("standard_promotion")
def test_nnx_optimizer():
    model = nnx.Linear(4, 6, use_bias=False, rngs=nnx.Rngs(0))
    before = model.kernel[...]
    optimizer = nnx.Optimizer(model, px.optim.muon(RATE), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((2, 4))).sum())(model))
    assert (model.kernel[...] != before).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -1}, "Learning rate should be >= 0 but is: -1"),
        ({"learning_rate": float("nan")}, "Learning rate should be >= 0 but is: nan"),
        ({"learning_rate": jnp.float32(-1)}, "Learning rate should be >= 0 but is: -1"),
        ({"learning_rate": jnp.ones(2)}, "Tensor lr must be 1-element"),
        ({"momentum": -0.5}, "momentum should be >= 0 but is: -0.5"),
        ({"weight_decay": -0.1}, "weight decay should be >= 0 but is: -0.1"),
        ({"weight_decay": float("nan")}, "weight decay should be >= 0 but is: nan"),
        ({"eps": -1e-7}, "epsilon should be >= 0 but is: -1e-07"),
        ({"adjust_lr_fn": "rms"}, "Adjust learning rate function rms is not supported"),
        ({"adjust_lr_fn": ""}, "Adjust learning rate function  is not supported"),
        ({"layout": "torch"}, "'in_out' .* or 'out_in' .* but is: 'torch'"),
        ({"ns_steps": 100}, "Number of steps must be less than 100"),
        ({"ns_steps": -1}, "Number of steps must be an integer >= 0 but is: -1"),
        ({"ns_steps": 2.5}, "Number of steps must be an integer >= 0 but is: 2.5"),
        ({"ns_coefficients": (1.0, 2.0)}, "Coefficients must be a tuple of exactly 3"),
    ],
)
def test_bad_arguments_are_refused_in_torchs_words(arguments, message):
    with pytest.raises(ValueError, match=message):
        px.optim.muon(**arguments)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (1.0, r"with size: \(\)"),
        (np.ones(3, np.float32), r"with size: \(3,\) at \['blocks'\]\[0\]"),
        (np.ones((2, 3, 4), np.float32), r"with size: \(2, 3, 4\)"),
    ],
)
def test_only_matrices_are_taken(leaf, message):
    message = f"Muon only supports 2D parameters whereas we found .* {message}"
    params = {"blocks": [leaf]}
    tx = px.optim.muon()
    with pytest.raises(ValueError, match=message):
        tx.init(params)
    state = tx.init({"blocks": [jnp.ones((2, 2))]})
    with pytest.raises(ValueError, match=f"Param gradient must be .*{message}"):
        jax.jit(tx.update)(params, state, params)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (jnp.complex64, "Muon does not support complex parameters: found complex64"),
        (jnp.int32, "Muon only supports floating-point parameters: found int32"),
    ],
)
def test_only_real_numbers_are_taken(dtype, message):
    params = {"w": jnp.ones((2, 2), dtype)}
    with pytest.raises(ValueError, match=rf"{message} at \['w'\]"):
        px.optim.scale_by_muon().init(params)
