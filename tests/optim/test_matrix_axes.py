"""Laws of parameters that hold several matrices, or matrices with several axes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st

import pliax as px
from pliax.optim.matrix_axes import matrices
from tests.optim import emulation


MatrixAxes = px.optim.MatrixAxes
RATE = 0.02


def update(params, **options):
    tx = px.optim.muon(RATE, **options)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    return updates


def array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_equal_updates(actual, expected):
    """Equal but for a last place of the bfloat16 result of Newton-Schulz."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=scale * 2.0**-6)


@st.composite
def axes_and_shapes(draw):
    """Rows, columns, batch and split of up to five dimensions in any order."""
    rank = draw(st.integers(2, 5))
    order = tuple(draw(st.permutations(range(rank))))
    first = draw(st.integers(1, rank - 1))
    second = draw(st.integers(first + 1, rank))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    rows = order[:first]
    size = math.prod(shape[axis] for axis in rows)
    cut = draw(st.integers(0, size - 1))
    split = (cut, size - cut) if cut else ()
    return (rows, order[first:second], order[second:], split), shape


@given(axes_and_shapes())
def test_taking_apart_and_putting_together_changes_nothing(case):
    arguments, shape = case
    axes = MatrixAxes(*arguments)
    leaf = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
    recipe = matrices(axes, shape)
    np.testing.assert_array_equal(recipe.put_together(recipe.taken_apart(leaf)), leaf)


@given(axes_and_shapes())
def test_matrices_are_those_that_their_axes_name(case):
    arguments, shape = case
    axes = MatrixAxes(*arguments)
    leaf = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    recipe = matrices(axes, shape)
    rows, columns, batch, _ = arguments
    ordered = leaf.transpose(*batch, *rows, *columns)
    whole = ordered.reshape(recipe.count, math.prod(shape[axis] for axis in rows), -1)
    pairs = zip(recipe.taken_apart(jnp.asarray(leaf)), recipe.parts, strict=True)
    for stack, part in pairs:
        expected = whole[:, part.start : part.start + part.rows]
        turned = expected if recipe.row_side == 0 else expected.transpose(0, 2, 1)
        np.testing.assert_array_equal(stack, turned)


@given(axes_and_shapes())
def test_each_matrix_is_scaled_by_the_factor_of_its_own_shape(case):
    arguments, shape = case
    axes = MatrixAxes(*arguments)
    recipe = matrices(axes, shape)
    factor = recipe.factors(lambda A, B: 10.0 * A + B)
    leaf = jnp.asarray(np.broadcast_to(np.float32(factor), shape))
    for stack, part in zip(recipe.taken_apart(leaf), recipe.parts, strict=True):
        assert (stack == 10 * part.rows + part.columns).all()


@pytest.mark.parametrize("execution", ["per_matrix", "stacked"])
@pytest.mark.parametrize("adjust_lr_fn", emulation.ADJUST_LR_FNS)
def test_scanned_layers_are_updated_as_their_matrices_are(execution, adjust_lr_fn):
    layers = array(0, 3, 8, 20)
    options = {"execution": execution, "adjust_lr_fn": adjust_lr_fn}
    got = update(layers, axes=MatrixAxes(2, 1, 0), **options)
    for layer, moved in zip(layers, got, strict=True):
        assert_equal_updates(moved, update(layer, **options))


def test_heads_are_flattened_or_matrices_of_their_own():
    kernel = array(1, 16, 4, 8)  # inputs, heads, channels
    flat = update(kernel, axes=MatrixAxes(rows=(1, 2), columns=0))
    assert_equal_updates(flat, update(kernel.reshape(16, 32)).reshape(16, 4, 8))
    each = update(kernel, axes=MatrixAxes(rows=2, columns=0, batch=1))
    for head in range(4):
        assert_equal_updates(each[:, head], update(kernel[:, head]))


@pytest.mark.slow
@pytest.mark.parametrize("adjust_lr_fn", emulation.ADJUST_LR_FNS)
def test_a_fused_projection_is_its_parts(adjust_lr_fn):
    parts = [array(seed, 16, size) for seed, size in enumerate((32, 8, 8))]
    options = {"adjust_lr_fn": adjust_lr_fn}
    fused = jnp.concatenate(parts, axis=1)
    got = update(fused, axes=MatrixAxes(1, 0, split=(32, 8, 8)), **options)
    expected = [update(part, **options) for part in parts]
    for moved, part in zip(np.split(got, [32, 40], axis=1), expected, strict=True):
        assert_equal_updates(moved, part)


def test_a_layout_is_the_axes_of_two_dimensional_leaves():
    G = array(2, 12, 7)
    for layout, axes in {"in_out": (1, 0), "out_in": (0, 1)}.items():
        expected = update(G, layout=layout)
        np.testing.assert_array_equal(update(G, axes=MatrixAxes(*axes)), expected)


def test_axes_may_be_a_prefix_of_the_parameters_or_a_function_of_them():
    params = {"scan": {"up": array(0, 2, 4, 8)}, "out": array(1, 8, 4)}
    stacked = MatrixAxes(-1, -2, 0)
    expected = update(params, axes={"scan": {"up": stacked}, "out": None})
    specs = [
        {"scan": stacked, "out": None},
        lambda tree: jax.tree.map(lambda x: stacked if x.ndim == 3 else None, tree),
    ]
    for axes in specs:
        jax.tree.map(np.testing.assert_array_equal, update(params, axes=axes), expected)


@pytest.mark.usefixtures("standard_promotion")
def test_axes_reach_through_masks_and_partitions():
    params = {"scan": array(0, 2, 4, 8), "norm": jnp.ones(8)}
    axes = {"scan": MatrixAxes(2, 1, 0), "norm": None}
    expected = update({"scan": params["scan"]}, axes=MatrixAxes(2, 1, 0))["scan"]
    masked = optax.masked(px.optim.muon(RATE, axes=axes), {"scan": True, "norm": False})
    parts: Any = {"muon": px.optim.muon(RATE, axes=axes), "adamw": optax.adamw(RATE)}
    labelled = optax.partition(parts, {"scan": "muon", "norm": "adamw"})
    for tx in (masked, labelled):
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        np.testing.assert_array_equal(updates["scan"], expected)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (MatrixAxes(0, 1), (2, 3, 4), "does not name each axis .* size .2, 3, 4. once"),
        (MatrixAxes(0, 1, 3), (2, 3, 4), "names axis 3, but the parameter has 3 axes"),
        (MatrixAxes(0, -3, 2), (2, 3, 4), "does not name each axis of a parameter"),
        (MatrixAxes(1, 0, split=(2, 3)), (4, 6), "splits 5 rows, .* size .4, 6. has 6"),
        (MatrixAxes((0, 1), ()), (4, 6), "names no axis of rows or none of columns"),
        ("in_out", (4, 6), "axes holds 'in_out', not a MatrixAxes or None"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes, shape, message):
    params = {"w": jnp.ones(shape)}
    with pytest.raises(ValueError, match=message):
        px.optim.muon(axes={"w": axes}).init(params)


def test_a_tree_of_axes_must_be_a_prefix():
    with pytest.raises(ValueError, match="axes is not a pytree prefix"):
        px.optim.muon(axes={"v": None}).init({"w": jnp.ones((2, 2))})


def test_leaves_of_more_axes_ask_for_them():
    with pytest.raises(ValueError, match="or say with axes= which of its axes are mat"):
        px.optim.muon().init(jnp.ones((2, 3, 4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0), "axis 0 is named twice in"),
        ((0, 1, (2, 1)), "axis 1 is named twice in"),
        ((0, 1, (), (3, 0)), r"split holds a size below 1: \(3, 0\)"),
        ((1.0, 0), "rows should be an integer or a tuple of integers but is: 1.0"),
        ((True, 0), "rows should be an integer or a tuple of integers but is: True"),
        ((1, "in"), "columns should be an integer or a tuple of integers but is: 'in'"),
        (
            (1, 0, None),
            "batch should be an integer or a tuple of integers but is: None",
        ),
    ],
)
def test_axes_of_no_matrix_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MatrixAxes(*arguments)


def test_axes_may_be_lists_and_arrays():
    axes = MatrixAxes(rows=[2], columns=np.array([1]), batch=np.int64(0), split=[4, 2])
    assert axes == MatrixAxes(2, 1, 0, (4, 2))
    assert hash(axes) == hash(MatrixAxes(2, 1, 0, (4, 2)))


@pytest.mark.parametrize("axes", [None, {"none": None, "w": None}])
def test_leaves_that_are_none_stay_none(axes):
    params = {"none": None, "w": array(0, 4, 6)}
    moved = update(params, axes=axes)
    assert moved["none"] is None
    np.testing.assert_array_equal(moved["w"], update(params["w"]))
