"""Random programs over arrays whose sizes are random expressions of two named sizes.

Each step makes an array of earlier ones, as long as some expression of their sizes, and
some steps branch on sizes. What px.compile gives is what jax.jit gives, in each call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax

import pliax as px


EXPRESSIONS = {
    "a": lambda a, b: a,
    "half": lambda a, b: a // 2,
    "half, up": lambda a, b: -(-a // 2),
    "third, up": lambda a, b: (a + 2) // 3,
    "even": lambda a, b: a - a % 2,
    "remainder": lambda a, b: a % 5 + 1,
    "sum": lambda a, b: a + b,
    "mean": lambda a, b: (a + b) // 2,
    "larger": lambda a, b: max(a, b),
    "smaller": lambda a, b: min(a, b),
    "excess": lambda a, b: max(a - b, 0),
    "distance": lambda a, b: abs(a - b),
    "product": lambda a, b: a * b // 4,
    "hash": lambda a, b: (a * b) % 7,
    "one less": lambda a, b: a - 1,
    "at most 4": lambda a, b: min(a, 4),
    "at least 4": lambda a, b: max(a, 4),
}


def fitted(x, y):
    n = min(x.shape[0], y.shape[0])
    return x[:n], y[:n]


def pairs(x):
    return x[: x.shape[0] // 2 * 2].reshape(-1, 2)


def rows(x):
    return jnp.pad(x, (0, -x.shape[0] % 3)).reshape(3, -1)


# Of two arrays of one axis and a size: an array of one axis.
OPERATIONS = {
    "concatenate": lambda x, y, n: jnp.concatenate([x, y]),
    "concatenate parts": lambda x, y, n: jnp.concatenate([x[1::2], y[::2]]),
    "last of both": lambda x, y, n: jnp.concatenate([x, y])[x.shape[0] :] * y,
    "first": lambda x, y, n: x[:n],
    "last": lambda x, y, n: x[n:],
    "every second": lambda x, y, n: x[::2],
    "backwards": lambda x, y, n: x[::-1],
    "roll": lambda x, y, n: jnp.roll(x, n),
    "pad": lambda x, y, n: jnp.pad(x, (1, n)),
    "edge": lambda x, y, n: jnp.pad(x[:1], (0, n), mode="edge"),
    "crop": lambda x, y, n: lax.pad(x, jnp.int32(0), [(-1, 2, 1)]),
    "twice": lambda x, y, n: jnp.tile(x, 2),
    "repeat": lambda x, y, n: jnp.repeat(x, 2),
    "spread": lambda x, y, n: jnp.repeat(x, jnp.abs(y[:1]) % 3, total_repeat_length=n),
    "cumulate": lambda x, y, n: jnp.cumsum(x[::-1]),
    "sort": lambda x, y, n: jnp.sort(x),
    "order": lambda x, y, n: jnp.argsort(x),
    "add": lambda x, y, n: jnp.add(*fitted(x, y)),
    "minimum": lambda x, y, n: jnp.minimum(*fitted(x, y)),
    "stack": lambda x, y, n: jnp.stack(fitted(x, y)).reshape(-1),
    "interleave": lambda x, y, n: jnp.stack(fitted(x, y), axis=1).reshape(-1),
    "sum of pairs": lambda x, y, n: pairs(x).sum(1),
    "pairs by columns": lambda x, y, n: pairs(x).T.reshape(-1),
    "product of rows": lambda x, y, n: (rows(x).T @ rows(x)).reshape(-1)[:16],
    "middle row": lambda x, y, n: rows(x)[1],
    "outer": lambda x, y, n: (x[:4, None] * y[None, :5]).reshape(-1),
    "columns": lambda x, y, n: (x[:, None] + y[None, :9]).max(1, initial=-5),
    "difference": lambda x, y, n: jnp.diff(x),
    "convolve": lambda x, y, n: jnp.convolve(x, jnp.array([1, 2, 3]), mode="same"),
    "window": lambda x, y, n: lax.reduce_window(
        x, jnp.int32(0), lax.add, (3,), (2,), "SAME"
    ),
    "range": lambda x, y, n: jnp.arange(n) * x.sum(),
    "fill": lambda x, y, n: jnp.full((n,), 3) + y.max(initial=0),
    "take": lambda x, y, n: jnp.take(x, y % 5, mode="clip"),
    "set": lambda x, y, n: x.at[y % 7].set(9, mode="drop"),
    "add at": lambda x, y, n: x.at[:n].add(1),
    "count": lambda x, y, n: jnp.bincount(jnp.abs(x) % 5, length=n),
    "segments": lambda x, y, n: jax.ops.segment_sum(x, jnp.abs(x) % 6, num_segments=n),
    "places": lambda x, y, n: jnp.nonzero(x > 0, size=n, fill_value=-1)[0],
    "scan": lambda x, y, n: lax.scan(lambda c, v: (c + v, c - v), jnp.int32(0), x)[1],
    "loop": lambda x, y, n: lax.fori_loop(0, n, lambda i, s: s + i, x),
    "map": lambda x, y, n: jax.vmap(lambda v: (v * y).sum())(x),
    "scale": lambda x, y, n: x * n + y.shape[0] // 2,
    "mask": lambda x, y, n: jnp.where(jnp.arange(x.shape[0]) < n, x, 0),
    "largest": lambda x, y, n: lax.top_k(x, min(x.shape[0], 3))[0],
    "equal sizes": lambda x, y, n: x * 2 if x.shape == y.shape else -x,
    "long": lambda x, y, n: x + 1 if x.shape[0] > n else x[::-1],
    "alike": lambda x, y, n: -x if (x.shape[0] > 4) == (y.shape[0] > n) else x,
    "divisible": lambda x, y, n: x - 1 if n % 2 == 0 else x,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on two earlier arrays, and a size made of two earlier sizes."""

    operation: str
    expression: str
    arrays: tuple[int, int]
    sizes: tuple[int, int]

    def run(self, known: list[Any]) -> Any:
        x, y = (known[-1 - i % len(known)] for i in self.arrays)
        a, b = (known[i % len(known)].shape[0] for i in self.sizes)
        size = EXPRESSIONS[self.expression](a, b)
        return OPERATIONS[self.operation](x, y, size)


SOME = st.integers(0, 7)
STEPS = st.builds(
    Step,
    st.sampled_from(sorted(OPERATIONS)),
    st.sampled_from(sorted(EXPRESSIONS)),
    st.tuples(SOME, SOME),
    st.tuples(SOME, SOME),
)
CALLS = st.tuples(st.integers(1, 12), st.integers(1, 12))


def outcome(f, *args):
    """What a function returns, or None where JAX knows no such program."""
    try:
        return jax.jit(f)(*args)
    except (TypeError, ValueError, IndexError, ZeroDivisionError):
        return None


@pytest.mark.parametrize("options", [{"dynamic": True}, {}], ids=["dynamic", "auto"])
@given(steps=st.lists(STEPS, min_size=2, max_size=6), calls=st.lists(CALLS, max_size=3))
def test_programs_of_random_sizes_are_what_jit_makes_of_them(options, steps, calls):
    def f(x, y):
        known = [x, y]
        for step in steps:
            known.append(step.run(known))
        return known[2:]

    compiled = px.compile(f, **options)
    for s, t in [(6, 9), *calls]:
        x = np.arange(s, dtype=np.int32) * 7 % 11 - 4
        y = np.arange(t, dtype=np.int32) * 5 % 13 - 3
        wanted = outcome(f, x, y)
        if wanted is None:
            continue
        found = compiled(x, y)
        assert [*map(jax.typeof, found)] == [*map(jax.typeof, wanted)], (s, t)
        for step, a, b in zip(steps, found, wanted, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str((step, s, t)))
