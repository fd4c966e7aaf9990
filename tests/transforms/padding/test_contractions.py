"""Products of padded arrays: sums of valid terms only, in every derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from transforms.padding.checking import check_each


def experts(x, w, counts):
    """A product with one matrix for each group of rows: a layer of experts."""
    return lax.ragged_dot(x, w, counts)


def loss(x, w, counts):
    return jnp.sum(experts(x, w, counts) ** 2)


def arguments(sizes):
    """Small integers, of which sums are exact; the last rows are in no group."""
    rng = np.random.default_rng(sizes["t"])
    t, d, g = sizes["t"], sizes["d"], 3
    x = rng.integers(-4, 5, (t, d)).astype(np.float32)
    w = rng.integers(-4, 5, (g, d, 3)).astype(np.float32)
    return x, w, np.full(g, (t - 1) // g, np.int32)


@pytest.mark.parametrize("f", [experts, jax.grad(loss, (0, 1))], ids=["f", "grad"])
def test_groups_of_rows_see_valid_rows_of_valid_groups(f):
    choices = [dict(zip("td", n, strict=True)) for n in ((7, 3), (1, 1), (8, 4))]
    high = {"t": 8, "d": 4}
    check_each(f, ("t, d", "3, d, 3", "3"), arguments, choices, high)
