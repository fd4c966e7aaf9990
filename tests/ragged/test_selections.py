"""Selections equal NumPy's, for any contents and sizes, none selected included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from ragged.laws import BUCKET, LENGTHS, Law, same, valid

import pliax as px
from pliax.ragged import Ragged, boolean_mask, nonzero, unique


ODD = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, 1.5, -1.5, 2.0], np.float32)
SEEDS = st.integers(0, 10**6)
SHARES = st.sampled_from([0.0, 0.3, 1.0])


def drawn(seed, length, share, *rest):
    """Distinct dyadic numbers, of which about this share is positive."""
    rng = np.random.default_rng(seed)
    x = (1 + rng.permutation(length * int(np.prod(rest))).reshape(length, *rest)) / 8
    sign = np.where(rng.random(length) < share, 1, -1)
    return (x * sign.reshape(length, *(1 for _ in rest))).astype(np.float32)


# One law for each ---------------------------------------------------------------------


MASKED = Law(lambda x: boolean_mask(x, x > 0))


@given(seed=SEEDS, length=LENGTHS, share=SHARES)
def test_boolean_mask_is_indexing_by_a_mask(seed, length, share):
    MASKED(lambda x: x[x > 0], drawn(seed, length, share))


ROWS = Law(lambda x: boolean_mask(x, x[:, 0] > 0))
COLUMNS = Law(lambda x: boolean_mask(x, jnp.array([True, False, True]), axis=1))
FLAT = Law(lambda x: boolean_mask(x, x > 0, axis=-2))


@given(seed=SEEDS, length=LENGTHS, share=SHARES)
def test_boolean_mask_over_any_axes(seed, length, share):
    x = drawn(seed, length, share, 3)
    ROWS(lambda x: x[x[:, 0] > 0], x)
    FLAT(lambda x: x[x > 0], x)
    found = px.compile(lambda x: boolean_mask(x, x[0] > 0, axis=1))(x)
    same(valid(found), x[:, x[0] > 0])


def test_a_constant_mask_over_another_axis_leaves_the_padded_one():
    x = drawn(0, 5, 1.0, 3)
    found = px.compile(
        lambda x: boolean_mask(x, jnp.array([True, False, True]), axis=1).sum(1),
        dims={"x": "t, _"},
    )(x)
    same(found, x[:, [0, 2]].sum(1), 1e-6)


INDICES = Law(lambda x: nonzero(x > 0))


@given(seed=SEEDS, length=LENGTHS, share=SHARES)
def test_nonzero_gives_indices_in_row_major_order(seed, length, share):
    x = drawn(seed, length, share, 2, 3)
    INDICES(lambda x: np.nonzero(x > 0), x)
    same(valid(nonzero(x > 0)), np.nonzero(x > 0))


def distinct(x):
    values, index, counts = unique(x, return_index=True, return_counts=True)
    return values, index, counts, unique(x, return_inverse=True)[1].max(initial=-1)


DISTINCT = Law(distinct)


def of_numpy(x):
    values, index, counts = np.unique(x, return_index=True, return_counts=True)
    return values, index, counts, np.unique(x, return_inverse=True)[1].max(initial=-1)


@given(values=st.lists(st.integers(0, 4), min_size=1, max_size=BUCKET))
def test_unique_integers_with_index_inverse_and_counts(values):
    DISTINCT(of_numpy, np.array(values, np.int32))


ODD_ONES = Law(lambda x: unique(x, return_counts=True))
ALL_NAN = Law(lambda x: unique(x, return_counts=True, equal_nan=False))


@given(values=st.lists(st.sampled_from(list(ODD)), min_size=1, max_size=BUCKET))
def test_unique_takes_all_nan_for_one_or_for_none(values):
    x = np.array(values, np.float32)
    ODD_ONES(lambda x: np.unique(x, return_counts=True), x)
    ALL_NAN(lambda x: np.unique(x, return_counts=True, equal_nan=False), x)


@given(values=st.lists(st.integers(-2, 2), min_size=0, max_size=8))
def test_the_inverse_restores_the_array(values):
    x = np.array(values, np.int32).reshape(2, -1) if len(values) % 2 == 0 else values
    x = np.asarray(x, np.int32)
    found, inverse = unique(x, return_inverse=True)
    assert not isinstance(inverse, Ragged) and inverse.shape == x.shape
    same(valid(found)[np.asarray(inverse)], x)


# Compositions -------------------------------------------------------------------------


def standardized(x):
    y = jnp.sort(boolean_mask(x, x > 0))
    return (y - y.mean()) @ y, y[::-1], jnp.cumsum(y), jnp.diff(y)


def standardized_by_numpy(x):
    y = np.sort(x[x > 0])
    mean = y.mean() if len(y) else np.float32(0)
    return (y - mean) @ y, y[::-1], np.cumsum(y), np.diff(y)


STANDARDIZED = Law(standardized)


@given(seed=SEEDS, length=LENGTHS, share=SHARES)
def test_what_is_selected_is_an_array_as_any_other(seed, length, share):
    STANDARDIZED(standardized_by_numpy, drawn(seed, length, share), tolerance=1e-4)


def gathered(x, w):
    rows, columns = nonzero(x > 0)
    picked = w[rows, columns]
    pairs = jnp.concatenate([picked, picked[:, None].sum(1)])
    return (
        picked,
        pairs,
        jax.ops.segment_sum(picked, columns, 3),
        boolean_mask(picked, picked > 1),
    )


def gathered_by_numpy(x, w):
    rows, columns = np.nonzero(x > 0)
    picked = w[rows, columns]
    sums = np.zeros(3, np.float32)
    np.add.at(sums, columns, picked)
    return picked, np.concatenate([picked, picked]), sums, picked[picked > 1]


GATHERED = Law(gathered, "x, w")


@given(seed=SEEDS, length=LENGTHS, share=SHARES)
def test_indices_read_other_arrays_and_make_groups(seed, length, share):
    x, w = drawn(seed, length, share, 3), np.abs(drawn(seed + 1, length, 1.0, 3))
    GATHERED(gathered_by_numpy, x, w, tolerance=1e-6)


def grouped(keys, x):
    values, inverse, counts = unique(keys, return_inverse=True, return_counts=True)
    sums = jnp.zeros_like(counts, dtype=x.dtype).at[inverse].add(x)
    return values, sums / counts.astype(x.dtype)


def grouped_by_numpy(keys, x):
    values = np.unique(keys)
    return values, np.array([x[keys == v].mean() for v in values], np.float32)


GROUPED = Law(grouped, "keys, x")


@given(seed=SEEDS, length=LENGTHS)
def test_means_by_group(seed, length):
    keys = np.random.default_rng(seed).integers(0, 4, length).astype(np.int32)
    GROUPED(grouped_by_numpy, keys, drawn(seed, length, 0.5), tolerance=1e-6)


def test_what_one_mask_selects_has_one_size():
    def f(x, y):
        mask = x > 0
        (places,) = nonzero(mask)
        return boolean_mask(x, mask) @ boolean_mask(y, mask) + y[places].sum()

    x, y = drawn(0, 9, 0.5), drawn(1, 9, 1.0)
    wanted = x[x > 0] @ y[x > 0] + y[x > 0].sum()
    same(px.compile(f)(x, y), wanted, 1e-5)
    with pytest.raises(TypeError, match="shape"):  # as far as anybody can know
        px.compile(lambda x, y: boolean_mask(x, x > 0) @ boolean_mask(y, y > 0))(x, y)


# Derivatives --------------------------------------------------------------------------


def loss(x, w):
    y = boolean_mask(x, x > 0)
    return (jnp.log(y) * w + 1 / y).sum()


def masked_loss(x, w):
    y = jnp.where(x > 0, x, 1.0)
    return jnp.where(x > 0, jnp.log(y) * w + 1 / y, 0.0).sum()


GRADIENT = Law(jax.grad(lambda x: loss(x, 3.0)))


@given(seed=SEEDS, length=LENGTHS, share=SHARES)
def test_gradients_are_those_of_a_masked_sum(seed, length, share):
    """What is not selected, where log and 1 / x have no number, gets 0."""
    x = drawn(seed, length, share)
    wanted = jax.grad(masked_loss)(x, 3.0)
    run = px.compile(jax.grad(loss), dims={"x": "t"})
    same(run(x, 3.0), wanted, 1e-5)
    full = np.full(BUCKET, np.nan, np.float32)
    full[:length] = x
    found = GRADIENT.run(jnp.int32(length), full)[:length]
    same(found, wanted, 1e-5)


def test_second_derivatives_and_forward_mode():
    x = drawn(0, 7, 0.5)
    for take in (jax.hessian, jax.jacfwd):
        found = px.compile(lambda x, take=take: take(lambda x: loss(x, 2.0))(x))(x)
        same(found, take(lambda x: masked_loss(x, 2.0))(x), 1e-5)


# Refusals -----------------------------------------------------------------------------


def test_what_does_not_fit_is_an_error():
    x = jnp.ones((4, 3))
    with pytest.raises(TypeError, match="the mask holds int32, not booleans"):
        boolean_mask(x, jnp.ones(4, jnp.int32))
    for mask, axis in ((jnp.ones(3, bool), 0), (jnp.ones((4, 3), bool), 1)):
        with pytest.raises(ValueError, match=r"a mask of shape .* from axis"):
            boolean_mask(x, mask, axis)
    with pytest.raises(ValueError, match="found a scalar"):
        nonzero(jnp.float32(1))


# Meshes -------------------------------------------------------------------------------


COUNTED = {
    "boolean_mask": lambda x: boolean_mask(x, x > 0),
    "boolean_mask of the array": lambda x: boolean_mask(x, jnp.ones(x.shape, bool)),
    "nonzero": lambda x: nonzero(x > 0)[0],
    "unique": unique,
    "repeat": lambda x: px.ragged.repeat(x, 2, bound=16),
    "repeat by repeats": lambda x: px.ragged.repeat(
        jnp.arange(8), (x > 0).astype(int), bound=16
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", COUNTED)
def test_an_explicit_mesh_may_not_divide_what_is_counted(name, compiled):
    f, x = COUNTED[name], jnp.arange(8.0) - 3
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    g = px.compile(f) if compiled else f

    def whole(x):
        return f(jax.sharding.reshard(x, jax.P(None)))

    with jax.set_mesh(mesh):
        divided = jax.device_put(x, jax.P("d"))
        said = rf"px.ragged.{name.split()[0]}: axis 0.*mesh axis 'd'.*\n.*P\(None\)"
        with pytest.raises(ValueError, match=said):
            g(divided)
        found = (px.compile(whole) if compiled else whole)(divided)
    np.testing.assert_array_equal(found.to_numpy(), f(x).to_numpy())


def test_axes_beside_those_that_are_counted_may_be_divided():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, mask = jnp.arange(48.0).reshape(6, 8), jnp.arange(6) % 2 == 0

    def loss(x):
        return (boolean_mask(x, mask) ** 2).sum()

    with jax.set_mesh(mesh):
        divided = jax.device_put(x, jax.P(None, "d"))
        assert px.compile(loss)(divided) == (x[::2] ** 2).sum()
        gradient = px.compile(jax.grad(loss))(divided)
    np.testing.assert_array_equal(gradient, np.where(mask[:, None], 2 * x, 0))


def test_auto_axes_are_gathered_by_the_compiler():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(8.0) - 3
    divided = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
    with jax.set_mesh(mesh):
        for f in COUNTED.values():
            found = px.compile(f)(divided).to_numpy()
            np.testing.assert_array_equal(found, f(x).to_numpy())
