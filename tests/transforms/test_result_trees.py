"""Results whose structure knows a size are those of `jax.jit`, at every size."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from pliax.core.collapse import ConstraintViolationError


SIZES = (3, 4, 5, 3, 1)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["length"]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """An array, and how long it is."""

    data: Any
    length: Any


def scaled(n, x):
    return x * n


KEPT = {
    "metadata": lambda x: Cache(2 * x, x.shape[0]),
    "metadata within": lambda x: {"a": [Cache(x, (x.shape[0] + 1, "t"))], "b": x},
    "a function of a size": lambda x: jax.tree_util.Partial(
        functools.partial(scaled, x.shape[0]), x
    ),
}


@pytest.mark.parametrize("f", KEPT.values(), ids=KEPT)
def test_sizes_in_the_structure_of_a_result_are_integers(f):
    compiled, plain = px.compile(f), jax.jit(f)
    for n in SIZES:
        x = np.arange(n, dtype=np.float32)
        found, wanted = compiled(x), plain(x)
        np.testing.assert_array_equal(
            jax.tree.leaves(found)[0], jax.tree.leaves(wanted)[0]
        )
        if not isinstance(found, jax.tree_util.Partial):
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
        else:
            np.testing.assert_array_equal(found(), wanted())


def test_what_keeps_a_size_may_be_an_argument_of_jax_jit():
    compiled = px.compile(KEPT["metadata"])
    use = jax.jit(lambda cache: cache.data * cache.length)
    for n in SIZES:
        x = np.ones(n, np.float32)
        np.testing.assert_array_equal(use(compiled(x)), 2 * n * x)


@pytest.mark.parametrize(
    "result",
    [lambda x: jax.vjp(jnp.sin, x)[1], lambda x: jax.linearize(jnp.sin, x)[1]],
    ids=["vjp", "linearize"],
)
def test_a_derivative_that_is_returned_may_be_called_at_every_size(result):
    compiled = px.compile(result)
    for n in SIZES:
        x = np.arange(n, dtype=np.float32)
        (found,) = jax.tree.leaves(compiled(x)(np.ones(n, np.float32)))
        np.testing.assert_allclose(found, np.cos(x), rtol=1e-6)


def test_a_declared_size_is_not_metadata_of_a_result():
    compiled = px.compile(KEPT["metadata"], dims={"x": "t"})
    with pytest.raises(ConstraintViolationError, match="needs t == 3"):
        compiled(np.ones(3, np.float32))


def test_results_that_keep_no_size_stay_in_buckets():
    compiled = px.compile(
        lambda x: (x, None, jax.tree_util.Partial(scaled, 3.0, x)), dims={"x": "t"}
    )
    for n in SIZES:
        _, _, found = compiled(np.ones(n, np.float32))
        np.testing.assert_array_equal(found(), np.full(n, 3.0))
    assert compiled.stats.traces == 1
