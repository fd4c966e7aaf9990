"""Laws of width transfer: what a step does to activations does not depend on width."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pliax as px


MatrixAxes = px.optim.MatrixAxes
BASE, WIDTHS = 64, (64, 128, 256, 512, 1024)
INPUTS, CLASSES, STEPS = 16, 4, 4


def sizes(width):
    return {
        "in": (INPUTS, width),
        "hidden": (width, width),
        "out": (width, CLASSES),
        "bias": (width,),
    }


def shapes(width):
    return {
        name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in sizes(width).items()
    }


def initial(width, seed, initialized):
    rng = np.random.default_rng(seed)

    def array(name, shape):
        if name == "bias":
            return jnp.zeros(shape)
        fan_in = shape[0] if initialized == "fan_in" or name == "in" else BASE
        return jnp.asarray(rng.standard_normal(shape) / fan_in**0.5, jnp.float32)

    return {name: array(name, shape) for name, shape in sizes(width).items()}


def activations(params, x):
    first = jnp.tanh(x @ params["in"] + params["bias"][None])
    second = jnp.tanh(first @ params["hidden"])
    return first, second, second @ params["out"]


def loss(params, x, y):
    logits = activations(params, x)[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def movement(width, make, *, transferred=True, initialized="fan_in"):
    """How much a few steps change each activation, root mean square, over seeds."""
    transfer = px.optim.mup(shapes(BASE), shapes(width), initialized=initialized)
    found = []
    for seed in range(3):
        params = initial(width, seed, initialized)
        params = transfer.rescale(params) if transferred else params
        tx = make(transfer if transferred else None)
        rng = np.random.default_rng(100 + seed)
        x = jnp.asarray(rng.standard_normal((32, INPUTS)), jnp.float32)
        y = jnp.asarray(rng.integers(0, CLASSES, 32))
        before, state = activations(params, x), tx.init(params)

        @jax.jit
        def step(params, state, x=x, y=y, tx=tx):
            updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(STEPS):
            params, state = step(params, state)
        after = activations(params, x)
        pairs = zip(after, before, strict=True)
        found.append([float(jnp.sqrt(jnp.mean((a - b) ** 2))) for a, b in pairs])
    return np.mean(found, axis=0)


def slopes(make, **options):
    """The power of the width with which each activation's movement grows."""
    moved = np.log2([movement(width, make, **options) for width in WIDTHS])
    return np.polyfit(np.log2(WIDTHS), moved, 1)[0]


def adam(transfer):
    scale = transfer.scale_adam() if transfer else optax.identity()
    return optax.chain(optax.adam(2e-3), scale)


def with_muon(adjust_lr_fn):
    """Muon for the hidden matrix, Adam for all others."""

    def make(transfer):
        muon = px.optim.muon(2e-2, 0.0, adjust_lr_fn=adjust_lr_fn)
        scale = transfer.scale_muon(adjust_lr_fn) if transfer else optax.identity()
        parts: Any = {"muon": optax.chain(muon, scale), "adamw": adam(transfer)}
        names = dict.fromkeys(sizes(BASE), "adamw") | {"hidden": "muon"}
        return optax.partition(parts, names)

    return make


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("initialized", ["fan_in", "constant"])
def test_adam_moves_activations_alike_at_every_width(initialized):
    assert np.abs(slopes(adam, initialized=initialized)).max() < 0.15


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "adjust_lr_fn", [None, "match_rms_adamw", "spectral_unclamped"]
)
def test_muon_moves_activations_alike_at_every_width(adjust_lr_fn):
    assert np.abs(slopes(with_muon(adjust_lr_fn))).max() < 0.15


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_without_transfer_wider_models_move_more():
    assert slopes(adam, transferred=False)[1:].min() > 0.4


def test_rates_and_scales_are_those_of_table_8():
    transfer = px.optim.mup(shapes(64), shapes(256))
    assert transfer.adam_rates == {"in": 1, "hidden": 0.25, "out": 0.25, "bias": 1}
    assert transfer.init_scales == {"in": 1, "hidden": 1, "out": 0.5, "bias": 1}
    constant = px.optim.mup(shapes(64), shapes(256), initialized="constant")
    assert constant.init_scales == {"in": 1, "hidden": 0.5, "out": 0.25, "bias": 1}


def test_the_same_width_changes_nothing():
    transfer = px.optim.mup(shapes(64), shapes(64))
    factors = jax.tree.leaves((transfer.init_scales, transfer.adam_rates))
    assert set(factors) == {1.0}


def test_layouts_are_transposes_of_each_other():
    def turned(tree):
        return {
            k: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype) for k, x in tree.items()
        }

    one = px.optim.mup(shapes(64), shapes(256))
    other = px.optim.mup(turned(shapes(64)), turned(shapes(256)), layout="out_in")
    assert one.adam_rates == other.adam_rates
    assert one.init_scales == other.init_scales


def test_batch_axes_belong_to_neither_side():
    base, params = jnp.ones((2, 8, 8)), jnp.ones((6, 32, 32))
    transfer = px.optim.mup(base, params, axes=MatrixAxes(2, 1, 0))
    assert transfer.adam_rates == 0.25


def test_biases_of_several_axes_are_input_weights():
    base, params = (
        {"b": jnp.ones((2, 8)), "n": None},
        {"b": jnp.ones((8, 8)), "n": None},
    )
    axes = {"b": MatrixAxes(rows=(0, 1), columns=()), "n": None}
    transfer = px.optim.mup(base, params, axes=axes)
    assert transfer.adam_rates == transfer.init_scales == {"b": 1.0, "n": None}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_are_kept(dtype):
    params = {name: jnp.ones(s, dtype) for name, s in sizes(128).items()}
    transfer = px.optim.mup(shapes(64), params)
    tx = transfer.scale_adam()
    updates, _ = tx.update(params, tx.init(params))
    for leaf in jax.tree.leaves((transfer.rescale(params), updates)):
        assert leaf.dtype == dtype


@pytest.mark.parametrize(
    ("base", "params", "options", "message"),
    [
        (
            {"a": jnp.ones(2)},
            {"b": jnp.ones(2)},
            {},
            "base and params differ in struct",
        ),
        (
            jnp.ones((2, 2)),
            jnp.ones((2, 2, 2)),
            {},
            r"\(2, 2\) in base and \(2, 2, 2\)",
        ),
        (jnp.ones((2, 2, 2)), jnp.ones((2, 2, 2)), {}, "Say with axes= which are rows"),
        (
            jnp.ones(2),
            jnp.ones(2),
            {"initialized": "he"},
            "'fan_in' .* or 'constant' b",
        ),
        (jnp.ones(2), jnp.ones(2), {"layout": "io"}, "layout should be 'in_out'"),
        (jnp.ones((0, 2)), jnp.ones((4, 2)), {}, r"size \(0, 2\) has no elements"),
        (
            jnp.ones((2, 6)),
            jnp.ones((2, 6)),
            {"axes": MatrixAxes(1, 0, split=(4, 2))},
            "splits the rows.* leave split out if all parts grow alike",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(base, params, options, message):
    with pytest.raises(ValueError, match=message):
        px.optim.mup(base, params, **options)
