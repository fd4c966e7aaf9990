"""One law for px.ragged: what NumPy says of the valid part, whatever the padding holds.

law = Law(f, "x, y")     f of arrays with the same leading size t, in a bucket of 12
law(oracle, x, y)        one executable, for every t and all contents
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from transforms.padding.checking import poisoned

import pliax as px


BUCKET = 12
LENGTHS = st.integers(1, BUCKET)


def valid(tree: Any) -> Any:
    """Results as NumPy arrays, `Ragged` ones without what is not valid."""

    def one(x: Any) -> Any:
        return x.to_numpy() if isinstance(x, px.ragged.Ragged) else np.asarray(x)

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, px.ragged.Ragged))


def same(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Asserts equal arrays; of integers the values count, not how wide they are."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class Law:
    """A function in a bucket, compiled once, against its oracle on plain arrays."""

    def __init__(self, f: Callable[..., Any], names: str = "x"):
        dims = {name.strip(): "t, ..." for name in names.split(",")}
        padded = px.pad(f, dims=dims)
        self.run = jax.jit(lambda t, *xs: padded(*xs, sizes={"t": t}))

    def __call__(
        self, oracle: Callable[..., Any], *xs: Any, tolerance: float = 0.0
    ) -> None:
        """Asserts the law for arrays of one length, under two kinds of poison."""
        (length,) = {len(x) for x in xs}
        found = []
        for kind in (0, 1):
            shapes = [(BUCKET, *x.shape[1:]) for x in xs]
            full = [poisoned(x, s, kind) for x, s in zip(xs, shapes, strict=True)]
            found.append(valid(self.run(jnp.int32(length), *full)))
        same(found[0], found[1])
        same(found[0], oracle(*xs), tolerance)
        run: Any = self.run
        assert run._cache_size() == 1
