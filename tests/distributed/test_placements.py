"""distribute: the same values, placed as the spec says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding

from pliax.distributed import data_parallel_mesh, distribute


AUTO = AxisType.Auto
ENTRIES = st.sampled_from([None, "x", "y", ("x", "y"), ("y", "x")])


@st.composite
def placed(draw):
    """A shape, and a spec that divides it and names each axis at most once."""
    entries, free = [], {"x", "y"}
    for entry in draw(st.lists(ENTRIES, max_size=3)):
        axes = set(entry) if entry else set()
        entries.append(entry if axes <= free else None)
        free -= axes
    rank = draw(st.integers(len(entries), 3))
    # Empty arrays stand in test_empty_arrays: XLA replicates those it computes.
    shape = tuple(8 * draw(st.integers(1, 2)) for _ in range(rank))
    return shape, jax.P(*entries)


@given(case=placed(), traced=st.booleans())
def test_values_stay_and_placement_is_the_spec(case, traced):
    shape, spec = case
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AUTO, AUTO))
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    place = lambda v: distribute(v, mesh, spec)  # noqa: E731
    out = jax.jit(place)(value) if traced else place(value)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, value)


def test_every_kind_of_leaf(mesh_4x2):
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {
        "numpy": np.ones((8, 2)),
        "jax": jnp.ones(8),
        "keys": keys,
        "none": None,
        "ints": np.arange(8),
    }
    out = distribute(tree, mesh_4x2, jax.P("x"))
    assert out["none"] is None
    for name in ("numpy", "jax", "keys", "ints"):
        assert out[name].sharding.spec == jax.P("x")
        assert out[name].addressable_shards[0].data.shape[0] == 2
    assert jnp.array_equal(jax.random.key_data(out["keys"]), jax.random.key_data(keys))
    scalars = distribute([1, 2.5, True, np.float32(3)], mesh_4x2, jax.P())
    assert [x.item() for x in scalars] == [1, 2.5, True, 3]
    assert all(x.sharding.is_fully_replicated for x in scalars)


def test_prefix_of_specs(mesh_4x2):
    tree = {"w": {"a": np.ones((8, 2)), "b": np.ones(8)}, "s": 1.0, "none": None}
    spec = {"w": jax.P("x"), "s": None, "none": None}
    out = distribute(tree, mesh_4x2, spec)
    assert out["w"]["a"].sharding.spec == out["w"]["b"].sharding.spec == jax.P("x")
    assert out["s"].sharding.is_fully_replicated
    assert distribute(tree, mesh_4x2, None)["w"]["b"].sharding.is_fully_replicated


def test_moves_between_placements(mesh_4x2):
    x = np.arange(32.0).reshape(8, 4)
    first = distribute(x, mesh_4x2, jax.P("x", "y"))
    second = distribute(first, mesh_4x2, jax.P(None, "y"))
    third = distribute(second, data_parallel_mesh(), jax.P("data"))
    np.testing.assert_array_equal(third, x)
    assert third.sharding.spec == jax.P("data")


def test_empty_arrays(mesh_4x2):
    out = distribute(np.ones((0, 2)), mesh_4x2, jax.P("x"))
    assert (out.shape, out.sharding.spec) == ((0, 2), jax.P("x"))


def test_empty_tree(mesh_4x2):
    assert distribute({}, mesh_4x2, jax.P("x")) == {}
    assert distribute(None, mesh_4x2, jax.P()) is None


def test_explicit_axes_inside_and_outside_jit():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = distribute(np.ones((8, 8)), mesh, jax.P("x"))
        out = jax.jit(lambda v: distribute(v, mesh, jax.P(None, "x")))(x)
    assert out.sharding.spec == jax.P(None, "x")


def test_under_grad_and_vmap(mesh_4x2):
    def f(x):
        return jnp.sum(distribute(x, mesh_4x2, jax.P("x")) ** 2)

    np.testing.assert_array_equal(jax.grad(f)(jnp.ones(8)), 2 * jnp.ones(8))
    np.testing.assert_array_equal(jax.vmap(f)(jnp.ones((3, 8))), 8 * jnp.ones(3))


@pytest.mark.parametrize("under_jit", [False, True])
@pytest.mark.parametrize(
    ("shape", "spec", "text"),
    [
        ((8,), jax.P("z"), r"axis 'z', but the mesh has \{'x': 4, 'y': 2\}"),
        (
            (8, 6),
            jax.P(None, "x"),
            r"dimension 1 of tree\['w'\]: f32\[8,6\] has size 6",
        ),
        ((8, 6), jax.P(("x", "y"), "x"), "axis 'x' of size 4 does not divide"),
        ((12,), jax.P(("x", "y")), "axis 'x' x 'y' of size 8 does not divide"),
        ((12,), jax.P(("x", "y")), "Pad or crop it to 16 or 8"),
        ((8,), jax.P("x", "y"), "has 2 entries but .* has 1 dimensions"),
        ((), jax.P("x"), "has 1 entries but .* has 0 dimensions"),
    ],
)
def test_wrong_specs(mesh_4x2, shape, spec, text, under_jit):
    tree = {"w": np.ones(shape, np.float32)}
    place = lambda t: distribute(t, mesh_4x2, spec)  # noqa: E731
    with pytest.raises(ValueError, match=text):
        (jax.jit(place) if under_jit else place)(tree)


def test_wrong_kinds(mesh_4x2):
    with pytest.raises(TypeError, match=r"spec holds 'x' of type str"):
        distribute(np.ones(8), mesh_4x2, "x")
    with pytest.raises(TypeError, match=r"tree\['a'\] has type str"):
        distribute({"a": "text"}, mesh_4x2, jax.P())
    with pytest.raises(ValueError, match="not a pytree prefix of tree"):
        distribute({"a": np.ones(8)}, mesh_4x2, {"b": jax.P()})
