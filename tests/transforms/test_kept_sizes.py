"""Laws of sizes that outlive their trace: elsewhere they are errors, never answers."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from pliax.core.other_traces import UnknownSizeError


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


class Decoder:
    def prefill(self, x):
        self.n = x.shape[0]
        return 2 * x


def filled(length: int = 5, **options) -> Decoder:
    """One that keeps a size of a trace which is over."""
    decoder = Decoder()
    px.compile(decoder.prefill, **options)(ones(length))
    return decoder


USES = {
    "larger": lambda y, n: y if y.shape[0] > n else -y,
    "turned": lambda y, n: y if n <= y.shape[0] else -y,
    "equal": lambda y, n: y if y.shape[0] == n else -y,
    "different": lambda y, n: y if y.shape[0] != n else -y,
    "looked up": lambda y, n: y if y.shape[0] in {n} else -y,
    "in a list": lambda y, n: y if y.shape[0] in [n] else -y,
    "alone": lambda y, n: y if n > 3 else -y,
    "sum": lambda y, n: y * (y.shape[0] + n),
    "remainder": lambda y, n: y if y.shape[0] % n == 0 else -y,
    "extreme": lambda y, n: y * max(y.shape[0], n),
    "value": lambda y, n: y * n,
    "float": lambda y, n: y * (n / 2),
    "slice": lambda y, n: y[:n],
    "index": lambda y, n: y[n - 1],
    "shape": lambda y, n: y.sum() + jnp.zeros(n),
    "integer": lambda y, n: y * int(n),
    "check": lambda y, n: (px.check(y.shape[0] >= n), y)[1],
    "check alone": lambda y, n: (px.check(n > 3), y)[1],
    "query": lambda y, n: y if px.guard_or_false(n > 3) else -y,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dims", [{"y": "t"}, None], ids=["symbolic", "constant"])
def test_a_kept_size_is_an_error_in_another_trace(use, dims):
    kept = filled(dims={"x": "t"}).n
    with pytest.raises(UnknownSizeError) as caught:
        px.compile(lambda y: USES[use](y, kept), dims=dims)(ones(9))
    text = str(caught.value)
    assert "prefill): the size " in text
    assert "t is x.shape[0]" in text
    assert "test_kept_sizes.py" in text
    assert "Pass it as an argument" in text


def test_what_a_trace_has_made_constant_is_kept_as_this_constant():
    class Model:
        def first(self, x):
            self.n = x.shape[0]
            return x * int(self.n)

    model, y = Model(), ones(9)
    px.compile(model.first, dynamic=True)(ones(5))
    for use, wanted in (("larger", y), ("value", 5 * y), ("slice", y[:5])):
        found = px.compile(lambda y, use=use: USES[use](y, model.n), dynamic=True)(y)
        np.testing.assert_array_equal(found, wanted)
    assert int(model.n) == 5
    assert {5: "five"}[model.n] == "five"


def test_a_pickled_size_is_an_integer_and_a_copied_one_itself():
    @px.compile(dynamic=True)
    def f(x):
        n = x.shape[0]
        assert copy.deepcopy(n) is n
        return x if pickle.loads(pickle.dumps(n)) == 5 else -x

    for length in (5, 6):
        np.testing.assert_array_equal(f(ones(length)), (-1) ** length * -ones(length))
    kept = filled(dims={"x": "t"}).n
    with pytest.raises(UnknownSizeError, match="by pickling"):
        pickle.dumps(kept)


def test_sizes_of_an_outer_trace_mean_themselves_in_inner_functions():
    @px.compile(dims={"x": "t"})
    def outer(x):
        n = x.shape[0]
        inner = px.compile(lambda y: USES["larger"](y, n) * n, dims={"y": "s"})
        return inner(x[:-1]), inner(ones(9))

    for length in (4, 6):
        first, second = outer(ones(length))
        np.testing.assert_array_equal(first, -length * ones(length - 1))
        np.testing.assert_array_equal(second, length * ones(9))


def test_caches_of_jax_tell_the_sizes_of_two_traces_apart():
    scaled = jax.jit(lambda x, n: x * n, static_argnums=1)
    for _ in range(2):
        f = px.compile(lambda x: scaled(x, x.shape[0]), dims={"x": "t"})
        for length in (3, 4):
            np.testing.assert_array_equal(f(ones(length)), length * ones(length))
