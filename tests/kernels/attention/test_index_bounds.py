"""Laws of what is known of a mod's integers: no value is beyond its bounds."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, strategies as st
from jax import lax

from pliax.core.jaxprs import close
from pliax.kernels.attention.index_bounds import IndexBounds
from pliax.kernels.attention.separation import MASK_MOD, separate


T, S = 5, 70
NUMBERS = st.integers(-9, 200) | st.sampled_from([2**24, 2**30, -(2**31), 2**31 - 1])
LEAVES = st.sampled_from(["q", "k"]) | NUMBERS
ONE = {"abs": jnp.abs, "neg": jnp.negative}
TWO = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "max": jnp.maximum,
    "min": jnp.minimum, "div": lax.div, "rem": lax.rem,
    "where": lambda x, y: jnp.where(x < y, x, y - 1),
}  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda x: (
        st.tuples(st.sampled_from(sorted(ONE)), x)
        | st.tuples(st.sampled_from(sorted(TWO)), x, x)
    ),
    max_leaves=6,
)


def value(tree, q, k):
    """Of a tree of operations; a divisor is never 0."""
    if not isinstance(tree, tuple):
        return (
            {"q": q, "k": k}[tree] if isinstance(tree, str) else q * 0 + np.int32(tree)
        )
    name, *parts = tree
    args = [value(x, q, k) for x in parts]
    if name in ("div", "rem"):
        args[1] = jnp.where(args[1] == 0, 1, args[1])
    return (ONE | TWO)[name](*args)


@example(tree=("add", 2**31 - 1, "q"))
@example(tree=("mul", 2**30, "k"))
@example(tree=("abs", -(2**31)))
@given(tree=TREES)
def test_no_integer_is_beyond_its_bounds_even_where_a_sum_wraps_around(tree):
    index = jax.ShapeDtypeStruct((), jnp.int32)
    mod = close(lambda b, h, q, k: value(tree, q, k) < 7, *[index] * 4)
    separated = separate(mod, MASK_MOD)
    bounds = IndexBounds(separated, {"b": 0, "h": 0, "q": T - 1, "k": S - 1})
    made = separated.makers[separated.jaxpr.outvars[0]].invars[0]
    low, high = bounds.of(made)
    q, k = (x.ravel() for x in jnp.meshgrid(jnp.arange(T), jnp.arange(S)))
    found = np.asarray(value(tree, q, k), np.int64)
    assert low <= found.min()
    assert found.max() <= high


def test_bounds_of_distances_are_those_of_indices():
    index = jax.ShapeDtypeStruct((), jnp.int32)

    def mod(b, h, q, k):
        return jnp.abs(q - k) + lax.div(k, 8) - lax.rem(k, 8) < 7

    separated = separate(close(mod, *[index] * 4), MASK_MOD)
    bounds = IndexBounds(separated, {"b": 0, "h": 0, "q": T - 1, "k": S - 1})
    made = separated.makers[separated.jaxpr.outvars[0]].invars[0]
    assert bounds.of(made) == (-7, S - 1 + 8)
