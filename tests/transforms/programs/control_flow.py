"""Loops and branches over symbolic sizes, and with symbolic arrays in their state."""

import jax
import jax.numpy as jnp
from jax import lax

from ._program import Program, program, table


def _rnn(w: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return lax.scan(step, jnp.zeros(xs.shape[1:]), xs)


def _running_max(xs: jax.Array) -> jax.Array:
    def step(m, x):
        m = jnp.maximum(m, x)
        return m, m

    return lax.scan(step, -jnp.inf, xs)[1]


def _sum_by_index(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, x.shape[0], lambda i, s: s + x[i], 0.0)


def _write_squares(x: jax.Array) -> jax.Array:
    def body(i, out):
        return out.at[i].set(x[i] ** 2)

    return lax.fori_loop(0, x.shape[0], body, jnp.zeros_like(x))


def _while_below(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first place where the running sum of |x| passes 3."""

    def more(state):
        i, total = state
        return (i < x.shape[0]) & (total < 3.0)

    def body(state):
        i, total = state
        return i + 1, total + jnp.abs(x[i])

    return lax.while_loop(more, body, (jnp.int32(0), jnp.float32(0.0)))


def _halve(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda v: jnp.max(jnp.abs(v)) > 0.5, lambda v: v * 0.5, x)


def _halve_mean(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda v: jnp.mean(v**2) > 0.1, lambda v: v * 0.5, x)


def _fixed_point(a: jax.Array, b: jax.Array) -> jax.Array:
    """x = A x + b for a contraction A, until the step is small."""
    a = a / (2.0 * jnp.abs(a).sum(1, keepdims=True) + 1e-3)

    def more(state):
        return jnp.max(jnp.abs(state[0] - state[1])) > 1e-3

    def body(state):
        return a @ state[0] + b, state[0]

    return lax.while_loop(more, body, (b, b + 1.0))[0]


def _newton(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 6, lambda _, y: 0.5 * (y + x / y), jnp.ones_like(x))


def _bisection(x: jax.Array) -> jax.Array:
    """The threshold that leaves about half of the mass, by 20 bisections."""

    def body(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        above = jnp.mean(x > middle, dtype=jnp.float32) > 0.5
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    return lax.fori_loop(0, 20, body, (jnp.min(x), jnp.max(x)))[0]


def _linear_recurrence(a: jax.Array, x: jax.Array) -> jax.Array:
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (a, x))[1]


def _sequential_recurrence(a: jax.Array, x: jax.Array) -> jax.Array:
    def step(h, ax):
        h = ax[0] * h + ax[1]
        return h, h

    return lax.scan(step, jnp.zeros(x.shape[1:]), (a, x))[1]


def _dynamic_programming(cost: jax.Array) -> jax.Array:
    """The cheapest path through a grid, moving right or down one row (both cyclic)."""

    def column(best, c):
        best = c + jnp.minimum(best, jnp.roll(best, 1))
        return best, best

    return lax.scan(column, cost[:, 0], cost[:, 1:].T)[0].min()


def _edit_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    """Levenshtein distance of two integer sequences, row by row."""

    def row(previous, xi):
        substituted = previous[:-1] + (y != xi).astype(jnp.int32)
        start = previous[0] + 1

        def cell(left, pair):
            best = jnp.minimum(jnp.minimum(left + 1, pair[0] + 1), pair[1])
            return best, best

        _, rest = lax.scan(cell, start, (previous[1:], substituted))
        return jnp.concatenate([start[None], rest]), None

    first = jnp.arange(y.shape[0] + 1, dtype=jnp.int32)
    return lax.scan(row, first, x)[0][-1]


def _viterbi(scores: jax.Array, moves: jax.Array) -> jax.Array:
    def forward(best, s):
        through = best[:, None] + moves
        return through.max(0) + s, through.argmax(0)

    best, back = lax.scan(forward, scores[0], scores[1:])

    def backward(state, pointers):
        return pointers[state], state

    first, path = lax.scan(backward, best.argmax(), back, reverse=True)
    return jnp.concatenate([first[None], path])


def _forward_algorithm(scores: jax.Array, moves: jax.Array) -> jax.Array:
    def step(alpha, s):
        return jax.nn.logsumexp(alpha[:, None] + moves, axis=0) + s, None

    return jax.nn.logsumexp(lax.scan(step, scores[0], scores[1:])[0])


def _ema(x: jax.Array) -> jax.Array:
    def step(m, v):
        m = 0.9 * m + 0.1 * v
        return m, m

    return lax.scan(step, x[0], x)[1]


def _chunks(x: jax.Array) -> jax.Array:
    return lax.map(lambda c: jnp.cumsum(c), x.reshape(-1, 4))


def _remainder_scan(x: jax.Array) -> jax.Array:
    def step(c, v):
        i, total = c
        return (i + 1, total + jnp.where(i % 3 == 0, v, 0.0)), total

    return lax.scan(step, (jnp.int32(0), jnp.float32(0.0)), x)[1]


def _root(x: jax.Array) -> jax.Array:
    def solve(f, y):
        return lax.fori_loop(0, 12, lambda _, v: v - f(v) / (2 * v + 1e-3), y)

    return lax.custom_root(
        lambda v: v * v - x,
        jnp.ones_like(x),
        solve,
        lambda g, y: y / g(jnp.ones_like(y)),
    )


def _custom_solve(d: jax.Array, y: jax.Array) -> jax.Array:
    return lax.custom_linear_solve(lambda v: d * v, y, lambda _, v: v / d)


def _branches(i: jax.Array, x: jax.Array) -> jax.Array:
    return lax.switch(i, [jnp.sin, jnp.sort, lambda v: v - v.mean()], x)


def _sizes_branch(x: jax.Array) -> jax.Array:
    return lax.cond(x.shape[0] > 4, jnp.cos, jnp.sin, x)


def _sinkhorn(x: jax.Array) -> jax.Array:
    def step(_, v):
        v = v - jax.nn.logsumexp(v, axis=1, keepdims=True)
        return v - jax.nn.logsumexp(v, axis=0, keepdims=True)

    return jnp.exp(lax.fori_loop(0, 5, step, x))


def _kmeans(x: jax.Array) -> jax.Array:
    def step(_, centres):
        nearest = jnp.argmin(jnp.abs(x[:, None] - centres[None, :]), axis=1)
        member = jax.nn.one_hot(nearest, 3)
        return (x @ member) / jnp.maximum(member.sum(0), 1.0)

    return lax.fori_loop(0, 4, step, jnp.array([-1.0, 0.0, 1.0]))


# fmt: off
_SCANS = [
    ("lax.scan[RNN over t]", _rnn, "3, 3", "t, b, 3"),
    ("lax.scan[cumulative sum]", lambda x: lax.scan(lambda c, v: (c + v,) * 2, 0.0, x)[1], "t"),
    ("lax.scan[reverse]", lambda x: lax.scan(lambda c, v: (c * 0.5 + v,) * 2, 0.0, x, reverse=True), "t"),
    ("lax.scan[final carry only]", lambda x: lax.scan(lambda c, v: (0.9 * c + v, None), 0.0, x)[0], "t"),
    ("lax.scan[length=t, no inputs]", lambda x: lax.scan(lambda c, _: (c * 1.5, c), 1.0, length=x.shape[0])[1], "t"),
    ("lax.scan[unroll=2]", lambda x: lax.scan(lambda c, v: (c + v, c), 0.0, x, unroll=2)[1], "2*b"),
    ("lax.scan[fixed length, symbolic carry]", lambda x: lax.scan(lambda c, v: (c * 0.5 + v, c.sum()), x[0], x), "4, t"),
    ("lax.scan[over layers]", lambda x, w: lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)[0], "b, t, 4", "2, 4, 4"),
    ("lax.scan[symbolic number of layers]", lambda x, w: lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)[0], "b, 4", "s, 4, 4"),
    ("lax.scan[linear recurrence]", _sequential_recurrence, "t, 3; probability", "t, 3"),
    ("lax.scan[cheapest path]", _dynamic_programming, "s, t; positive", "t >= 2"),
    ("lax.scan[Viterbi]", _viterbi, "t, 4", "4, 4", "t >= 2"),
    ("lax.scan[forward algorithm]", _forward_algorithm, "t, 4", "4, 4"),
    ("lax.scan[moving average]", _ema, "t, 3"),
    ("lax.scan[every third]", _remainder_scan, "t"),
    ("lax.scan[softmax of each row]", lambda x: lax.scan(lambda c, v: (c, jax.nn.softmax(v)), 0.0, x)[1], "b, t"),
    ("lax.map[row means]", lambda x: lax.map(jnp.mean, x), "b, t"),
    ("lax.map[chunks]", _chunks, "4*b"),
    ("lax.fori_loop[sum by index]", _sum_by_index, "t"),
    ("lax.fori_loop[fixed count, centre]", lambda x: lax.fori_loop(0, 3, lambda _, v: jnp.tanh(v - v.mean()), x), "b, t"),
    ("lax.fori_loop[Newton square root]", _newton, "b, t; positive"),
    ("lax.fori_loop[matrix powers]", lambda a: lax.fori_loop(0, 3, lambda _, v: v @ a, jnp.eye(a.shape[0])), "t, t; unit"),
    ("lax.fori_loop[bisection]", _bisection, "t"),
    ("lax.fori_loop[Sinkhorn]", _sinkhorn, "s, t"),
    ("lax.fori_loop[k-means]", _kmeans, "t"),
    ("lax.fori_loop[traced bound]", lambda x, n: lax.fori_loop(0, n, lambda i, s: s + x[i], 0.0), "t", "; index:t"),
    ("lax.while_loop[running sum]", _while_below, "t"),
    ("lax.while_loop[mean decides]", _halve_mean, "b, t"),
    ("lax.while_loop[fixed point]", _fixed_point, "t, t", "t"),
    ("lax.cond[mean decides]", lambda x: lax.cond(x.mean() > 0, lambda v: v - v.mean(), jnp.tanh, x), "b, t"),
    ("lax.cond[reductions inside]", lambda x, p: lax.cond(p, jnp.sum, jnp.max, x), "t", "; boolean"),
    ("lax.cond[size decides]", _sizes_branch, "t"),
    ("lax.switch[three branches]", _branches, "; index:3", "t"),
    ("lax.associative_scan[add]", lambda x: lax.associative_scan(jnp.add, x), "t"),
    ("lax.associative_scan[linear recurrence]", _linear_recurrence, "t, 3; probability", "t, 3"),
    ("lax.associative_scan[reverse, axis=1]", lambda x: lax.associative_scan(jnp.add, x, reverse=True, axis=1), "b, t"),
    ("lax.associative_scan[batch only]", lambda x: lax.associative_scan(jnp.add, x, axis=1), "b, 8"),
    ("lax.custom_root[square root]", _root, "t; positive"),
    ("lax.custom_linear_solve[diagonal]", _custom_solve, "t; positive", "t"),
]
_EXACT = [
    ("lax.scan[running maximum]", _running_max, "t"),
    ("lax.scan[edit distance]", _edit_distance, "s; index:4", "t; index:4"),
    ("lax.scan[integers]", lambda x: lax.scan(lambda c, v: (c * 3 + v, c), 0, x), "t; integer"),
    ("lax.scan[count of sign changes]", lambda x: lax.scan(lambda c, v: ((v, c[1] + jnp.int32(c[0] * v < 0)), None), (0.0, jnp.int32(0)), x)[0][1], "t"),
    ("lax.map[elements]", lambda x: lax.map(lambda v: v * 2.0, x), "t, 3"),
    ("lax.map[batch_size=4]", lambda x: lax.map(lambda v: v[::-1], x, batch_size=4), "t, 3"),
    ("lax.map[sort rows]", lambda x: lax.map(jnp.sort, x), "b, t"),
    ("lax.fori_loop[write by index]", _write_squares, "t"),
    ("lax.fori_loop[integer]", lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c * 5 + i, 1), "t"),
    ("lax.while_loop[max decides]", _halve, "b, t"),
    ("lax.while_loop[count to t]", lambda x: lax.while_loop(lambda i: i * i < x.shape[0], lambda i: i + 1, 0), "t"),
    ("lax.cond[any decides]", lambda m, x: lax.cond(jnp.any(m), jnp.negative, jnp.abs, x), "b; boolean", "t"),
    ("lax.associative_scan[max]", lambda x: lax.associative_scan(jnp.maximum, x), "t"),
    ("lax.platform_dependent[t]", lambda x: lax.platform_dependent(x, cpu=jnp.sort, default=jnp.sort), "t"),
    ("lax.composite[t]", lambda x: lax.composite(jnp.negative, "pliax.negative")(x), "t"),
]
# fmt: on

PROGRAMS: tuple[Program, ...] = (
    *table("", _SCANS),
    *table("", _EXACT, exact=True),
    program("lax.scan[nested, b and t]", lambda x: lax.map(_ema, x), "b, t, 2"),
    program("lax.scan[vmap of scan]", jax.vmap(_ema), "b, t"),
)
