"""A Ragged is a pytree of an array and its size; functions take it as an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from pliax.ragged import Ragged, boolean_mask


X = np.array([3.0, -1.0, 2.0, -5.0, 1.5], np.float32)


def positive(x):
    return boolean_mask(jnp.asarray(x), jnp.asarray(x) > 0)


def test_it_holds_data_bound_and_size():
    found = positive(X)
    assert isinstance(found, Ragged)
    assert (found.bound, int(found.size), found.size.dtype) == (5, 3, jnp.int32)
    assert repr(found) == "Ragged(float32[<=5])"
    assert np.array_equal(found.to_numpy(), X[X > 0])


def test_the_size_counts_from_the_end_so_a_batch_in_front_does_not_move_it():
    batch = jax.vmap(positive)(jnp.stack([X, -X]))
    assert repr(batch) == "Ragged(float32[2, <=5])"
    for i, x in enumerate((X, -X)):
        row = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
        assert np.array_equal(row.to_numpy(), x[x > 0])
    with pytest.raises(ValueError, match=r"a size for each of \(2,\) rows"):
        batch.to_numpy()
    with pytest.raises(ValueError, match=r"has \(2,\) sizes, one for each row"):
        px.compile(jnp.sum)(batch)


def test_it_goes_through_jit_scan_and_tree_map():
    once = positive(X)
    again = jax.jit(lambda r: jax.tree.map(lambda leaf: leaf, r))(once)
    assert jax.tree.structure(again) == jax.tree.structure(once)
    assert np.array_equal(again.to_numpy(), once.to_numpy())
    carried, _ = jax.lax.scan(lambda r, _: (positive(r.data), None), once, None, 2)
    assert isinstance(carried, Ragged)
    leaves, structure = jax.tree.flatten(once)
    assert len(leaves) == 2 and jax.tree.unflatten(structure, leaves) is not None
    saved = jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])
    assert np.array_equal(saved.to_numpy(), once.to_numpy())


@pytest.mark.parametrize("dims", [None, {"r.data": "t"}])
def test_as_an_argument_it_is_an_array(dims):
    def f(r):
        y = jax.checkpoint(jnp.sin)(r)
        return y.mean(), y * 2, jnp.asarray(y.shape[0])

    f = px.compile(f, dims=dims)
    mean, doubled, size = f(positive(X))
    y = np.sin(X[X > 0])
    np.testing.assert_allclose(mean, y.mean(), rtol=1e-6)
    np.testing.assert_allclose(doubled.to_numpy(), 2 * y, rtol=1e-6)
    assert (size, doubled.bound) == (3, 5)


def test_one_executable_serves_every_number_of_elements():
    f = px.compile(lambda r: (r * 2, r.sum()))
    for x in (X, -X, -np.abs(X), np.abs(X)):
        doubled, total = f(positive(x))
        assert np.array_equal(doubled.to_numpy(), 2 * x[x > 0])
        assert total == x[x > 0].sum()
    assert f.stats.compilations == 1


def test_its_bound_may_change_as_any_size():
    f = px.compile(lambda r: r + 1)
    for length in (3, 4, 5, 2):
        found = f(positive(X[:length]))
        assert found.bound == length
        assert np.array_equal(found.to_numpy(), X[:length][X[:length] > 0] + 1)


def test_px_pad_takes_and_gives_it():
    padded = px.pad(lambda r, y: (r * 2) @ r + y.sum(), dims={"y": "t"})
    y = np.array([1.0, 2.0, np.nan], np.float32)
    wanted = 2 * (X[X > 0] ** 2).sum() + 3
    np.testing.assert_allclose(padded(positive(X), y, sizes={"t": 2}), wanted)
    selected = px.pad(lambda x: boolean_mask(x, x > 0), dims={"x": "t"})
    found = selected(np.append(X, np.float32(9)), sizes={"t": 5})
    assert np.array_equal(found.to_numpy(), X[X > 0])
    assert selected.out_shapes(X, sizes={"t": 4}).data == (4,)


def test_two_such_axes_in_one_result_are_refused():
    f = px.compile(lambda r: jnp.outer(r, r))
    with pytest.raises(
        ValueError, match=r"shape \(u0, u0\) has 2 sizes born from data"
    ):
        f(positive(X))


def test_its_axis_is_counted_from_the_end():
    for axis in (0, 1, -2):
        with pytest.raises(ValueError, match="no axis of an array of rank 1 counted"):
            px.compile(jnp.sum)(px.ragged.Ragged(X, jnp.int32(2), axis=axis))
        with pytest.raises(ValueError, match="no axis of an array of rank 1 counted"):
            px.ragged.Ragged(X, jnp.int32(2), axis=axis).to_numpy()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((X, None), "a size of NoneType, which is no integer"),
        ((X, 2.0), r"a size of float\w*, which is no integer"),
        ((X, np.True_), r"a size of bool\w*, which is no integer"),
        ((None, 2), "holds NoneType, which is no array"),
        ((list(X), 2), "holds list, which is no array"),
    ],
)
def test_it_is_made_of_an_array_and_an_integer(parts, reason):
    made = px.ragged.Ragged(*parts)
    for use in (px.compile(jnp.sum), lambda made: made.to_numpy()):
        with pytest.raises(TypeError, match=f"{reason}.\nMake it of an array and"):
            use(made)


def test_a_size_may_be_an_integer_of_python():
    f = px.compile(jnp.sum)
    for size in (2, 3, 1, 4, 2):
        assert f(px.ragged.Ragged(X, size)) == X[:size].sum()


def test_random_keys_are_taken_as_keys():
    keys = jax.random.split(jax.random.key(0), len(X))
    found = boolean_mask(keys, X > 0)
    with pytest.raises(TypeError, match=r"random keys, which NumPy has not.\nTake"):
        found.to_numpy()
    assert (found.data[: int(found.size)] == keys[X > 0]).all()


def test_numpy_takes_the_valid_part():
    assert np.array_equal(np.asarray(positive(X)), X[X > 0])
    assert np.asarray(positive(X), np.float64).dtype == np.float64
    assert np.array(positive(X)).flags.writeable
    with pytest.raises(ValueError, match="copy"):
        np.asarray(positive(X), np.float64, copy=False)
