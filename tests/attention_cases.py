"""Mods and masks every implementation is held to: arrays they capture, and programs.

What one captures is made for lengths (T, S); it is a factory from these arrays, so that
laws can differentiate, replace and widen what was captured.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px
from pliax.core._jax import threefry2x32_p
from pliax.kernels.attention import masks, mods


B, H, K = 2, 4, 2


@dataclass(frozen=True)
class Mod:
    """A score_mod for scalars, and the same over whole arrays.

    Attributes:
        name: What it shows.
        make: `(*floats, *others) -> score_mod`.
        plain: The same for `attention_plain.attention`; None where the expression reads
            the same for whole arrays.
        floats: Shapes of the floating arrays it captures for lengths (T, S).
        others: The other arrays it captures.
        dtype: Of the floating arrays; None for the working dtype.
    """

    name: str
    make: Callable[..., Any]
    plain: Callable[..., Any] | None = None
    floats: Callable[[int, int], tuple[tuple[int, ...], ...]] = lambda T, S: ()
    others: Callable[[int, int], tuple[Any, ...]] = lambda T, S: ()
    dtype: Any = None

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Mask:
    """A mask_mod for scalars, and the same over whole arrays.

    Attributes:
        name: What it shows.
        make: `(*arrays) -> mask_mod`; None hides nothing and makes no mask.
        plain: As for `Mod`.
        arrays: The arrays it captures for lengths (T, S).
        batch: Whether it reads b.
        heads: Whether it reads h.
        lengths: (T, S) where it is made for these alone.
    """

    name: str
    make: Callable[..., Any] | None = None
    plain: Callable[..., Any] | None = None
    arrays: Callable[[int, int], tuple[Any, ...]] = lambda T, S: ()
    batch: bool = False
    heads: bool = False
    lengths: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return self.name


def numbers(seed, shape, high, dtype: Any = np.int32):
    """Random integers below `high`."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), dtype)


def gaussian(seed, shape, dtype=jnp.float32):
    """Normal numbers from NumPy: JAX would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def distance(s, q, k):
    return abs(q - k).astype(s.dtype)


def whole(x, dtype):
    """A number for each head, along the axis of heads of (B, H, T, S)."""
    return x.astype(dtype)[None, :, None, None]


def of_head(x, h, s):
    return x[h].astype(s.dtype)


# --- score_mods of the library --------------------------------------------------------


def _t5_bucket(relative, buckets, max_distance, bidirectional):
    """The published bucketing of `key - query`, in float64."""
    n, first = -relative, 0
    if bidirectional:
        buckets //= 2
        first = (relative > 0) * buckets
        n = np.abs(n)
    n = np.maximum(n, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(n, 1) / exact) / np.log(max_distance / exact)
    large = exact + (ratio * (buckets - exact) + 1e-9).astype(int)
    return first + np.where(n < exact, n, np.minimum(large, buckets - 1))


def _t5(bidirectional):
    def plain(table):
        def score(s, b, h, q, k):
            T, S = s.shape[2:]
            relative = np.arange(S)[None] - np.arange(T)[:, None]
            bias = table[_t5_bucket(relative, 8, 20, bidirectional)]
            return s + jnp.moveaxis(bias, 2, 0)[None].astype(s.dtype)

        return score

    return plain


def _dropout_plain(rate, generator):
    def score(s, b, h, q, k):
        words = jax.random.key_data(generator.key()[1])
        places = (jnp.broadcast_to(x, s.shape).astype(jnp.uint32) for x in (b, h, q, k))
        b, h, q, k = places
        first, second = (jnp.broadcast_to(word, s.shape) for word in words)
        row = threefry2x32_p.bind(first, second, b, h)
        word = threefry2x32_p.bind(*row, q, k)[0]
        kept = word >= jnp.uint32(round(rate * 2**32))
        return jnp.where(kept, s - math.log1p(-rate), -jnp.inf)

    return score


def _alibi_plain(slopes):
    return lambda s, b, h, q, k: s - whole(slopes, s.dtype) * distance(s, q, k)


def _clipped_plain(table):
    def score(s, b, h, q, k):
        index = jnp.minimum(jnp.maximum(q - k, -5), 5) + 5
        return s + table[jnp.broadcast_to(h, (1, H, 1, 1)), index].astype(s.dtype)

    return score


def _cap_plain(cap):
    def score(s, b, h, q, k):
        bound = whole(jnp.abs(cap) + 0.5, s.dtype)
        return bound * jnp.tanh(s / bound)

    return score


def _composed_plain(slopes):
    bias = _alibi_plain(slopes)
    return lambda s, *index: 2.0 * jnp.tanh(bias(s, *index) / 2.0)


def _moved_plain(rate, offset):
    def score(s, b, h, q, k):
        away = abs(q + offset[b] - k).astype(s.dtype)
        return s - jnp.abs(rate).astype(s.dtype) * away

    return score


LIBRARY_MODS = [
    Mod(
        "alibi", lambda: mods.alibi(H),
        lambda: _alibi_plain(jnp.asarray([1 / 4, 1 / 16, 1 / 64, 1 / 256])),
    ),
    Mod("learned_alibi", mods.alibi, _alibi_plain, lambda T, S: ((H,),)),
    Mod(
        "distance_decay", lambda: mods.distance_decay(0.125),
        lambda: lambda s, b, h, q, k: s - 0.125 * distance(s, q, k),
    ),
    Mod(
        "learned_decay", mods.distance_decay,
        lambda r: lambda s, b, h, q, k: s - r.astype(s.dtype) * distance(s, q, k),
        lambda T, S: ((),),
    ),
    Mod("relative_bias", mods.relative_bias, _clipped_plain, lambda T, S: ((H, 11),)),
    Mod(
        "causal_bias", lambda table: mods.relative_bias(table, max_distance=4),
        lambda table: lambda s, b, h, q, k: s + table[jnp.clip(q - k, 0, 4)],
        lambda T, S: ((5,),),
    ),
    Mod(
        "t5_encoder", lambda table: mods.t5_bias(table, max_distance=20), _t5(True),
        lambda T, S: ((8, H),),
    ),
    Mod(
        "t5_decoder",
        lambda table: mods.t5_bias(table, max_distance=20, bidirectional=False),
        _t5(False), lambda T, S: ((8, H),),
    ),
    Mod(
        "soft_cap", lambda: mods.soft_cap(2.0),
        lambda: lambda s, b, h, q, k: 2.0 * jnp.tanh(s / 2.0),
    ),
    Mod(
        "learned_cap", lambda cap: mods.soft_cap(jnp.abs(cap) + 0.5), _cap_plain,
        lambda T, S: ((H,),),
    ),
    Mod(
        "dropout", lambda generator: mods.dropout(generator, 0.25),
        functools.partial(_dropout_plain, 0.25), others=lambda T, S: (px.Generator(3),),
    ),
    Mod(
        "composed", lambda slopes: mods.compose(mods.alibi(slopes), mods.soft_cap(2)),
        _composed_plain, lambda T, S: ((H,),),
    ),
    Mod(
        "moved", lambda rate, offset: mods.with_offset(
            mods.distance_decay(jnp.abs(rate)), offset
        ),
        _moved_plain, lambda T, S: ((),), lambda T, S: (jnp.asarray([3, 9], jnp.int32),),
    ),
]  # fmt: skip


# --- score_mods as users write them ---------------------------------------------------


@jax.custom_jvp
def cube(x):
    return x * x * x


@cube.defjvp
def _cube_jvp(primals, tangents):
    ((x,), (dx,)) = primals, tangents
    return cube(x), 3 * x * x * dx


@jax.custom_vjp
def halved_square(x, w):
    return 0.5 * x * x * w


def _halved_square_forward(x, w):
    return halved_square(x, w), (x, w)


def _halved_square_backward(kept, g):
    x, w = kept
    return g * x * w, g * 0.5 * x * x


halved_square.defvjp(_halved_square_forward, _halved_square_backward)


class Tempered:
    """A module-like object whose call is the mod."""

    def __init__(self, temperature, table):
        self.temperature, self.table = temperature, table

    def __call__(self, score, b, h, q_idx, kv_idx):
        scaled = score * (1.0 + jnp.square(of_head(self.temperature, h, score)))
        return scaled + self.table[q_idx % 7].astype(score.dtype)


def _with_table(table, strength, score, b, h, q_idx, kv_idx):
    return score + strength * table[(3 * q_idx + kv_idx) % 9].astype(score.dtype)


def _nested_jit(table):
    @jax.jit
    def inner(x, q, k):
        return jax.jit(lambda y: y + table[(q + 2 * k) % 8].astype(y.dtype))(jnp.sin(x))

    return lambda s, b, h, q, k: inner(s, q, k)


def _fori(table):
    def score_mod(s, b, h, q, k):
        def step(i, x):
            return x + table[i, (q + i) % 3].astype(s.dtype) * jnp.sin(x)

        return jax.lax.fori_loop(0, 3, step, s)

    return score_mod


def _fori_plain(table):
    def score(s, b, h, q, k):
        for i in range(3):
            s = s + table[i][(q + i) % 3].astype(s.dtype) * jnp.sin(s)
        return s

    return score


def _scan(coefficients):
    """Horner's rule in tanh(s)."""

    def score_mod(s, b, h, q, k):
        x = jnp.tanh(s)

        def step(total, c):
            return total * x + c.astype(s.dtype), None

        return jax.lax.scan(step, jnp.zeros_like(s), coefficients)[0]

    return score_mod


def _scan_plain(c):
    def score(s, b, h, q, k):
        x = jnp.tanh(s)
        c0, c1, c2, c3 = (c[i].astype(s.dtype) for i in range(4))
        return c0 * x * x * x + c1 * x * x + c2 * x + c3

    return score


def _embedded(rows, columns):
    def score_mod(s, b, h, q, k):
        return s + jnp.sum(rows[q] * columns[k]).astype(s.dtype)

    return score_mod


def _embedded_plain(rows, columns):
    bias = lambda: jnp.einsum("td,sd->ts", rows, columns)[None, None]  # noqa: E731
    return lambda s, b, h, q, k: s + bias().astype(s.dtype)


def _log_rows(rows):
    """A reduction of two rows of one array that is no product."""

    def score_mod(s, b, h, q, k):
        return s - jax.nn.logsumexp(rows[q % 6] + rows[k % 6]).astype(s.dtype)

    return score_mod


def _log_rows_plain(rows):
    def score(s, b, h, q, k):
        both = rows[q[0, 0, :, 0] % 6][:, None] + rows[k[0, 0, 0] % 6][None]
        return s - jnp.log(jnp.sum(jnp.exp(both), axis=-1))[None, None].astype(s.dtype)

    return score


def _views(table):
    def score_mod(s, b, h, q, k):
        first = table[::2][h % 2, q % 3] + table.T[k % 6, h]
        return s + (first + table.reshape(2, -1)[b, q % 12]).astype(s.dtype)

    return score_mod


def _views_plain(table):
    def score(s, b, h, q, k):
        first = table[2 * (h % 2), q % 3] + table[h, k % 6]
        place = 12 * b + q % 12
        return s + (first + table[place // 6, place % 6]).astype(s.dtype)

    return score


def _chained(offsets, sequence):
    def score_mod(s, b, h, q, k):
        return s + offsets[sequence[b][q]].astype(s.dtype) * (k % 4).astype(s.dtype)

    return score_mod


def _chained_plain(offsets, sequence):
    def score(s, b, h, q, k):
        chosen = offsets[sequence][:, None, :, None].astype(s.dtype)
        return s + chosen * (k % 4).astype(s.dtype)

    return score


def _partly(bias):
    return lambda s, b, h, q, k: s + bias[b][q][k].astype(s.dtype)


def _switched(s, b, h, q, k):
    return jax.lax.switch(h % 3, [jnp.sin, jnp.tanh, lambda x: 0.5 * x], s)


def _switched_plain(s, b, h, q, k):
    which = h % 3
    return jnp.where(
        which == 0, jnp.sin(s), jnp.where(which == 1, jnp.tanh(s), 0.5 * s)
    )


def _sequences(T, S):
    return (numbers(5, (B, T), 6),)


# What a loop reads is float32: gradients are summed in float32 outside of loops only.
WRITTEN_MODS = [
    Mod("none", lambda: None),
    Mod("relu", lambda: lambda s, b, h, q, k: jax.nn.relu(s + 0.1),
        lambda: lambda s, b, h, q, k: jnp.maximum(s + 0.1, 0.0)),
    Mod("softplus", lambda: lambda s, b, h, q, k: 2.0 * jax.nn.softplus(s),
        lambda: lambda s, b, h, q, k: 2.0 * jnp.log1p(jnp.exp(s))),
    Mod("silu", lambda: lambda s, b, h, q, k: jax.nn.silu(s),
        lambda: lambda s, b, h, q, k: s / (1.0 + jnp.exp(-s))),
    Mod("gelu", lambda: lambda s, b, h, q, k: jax.nn.gelu(s),
        lambda: lambda s, b, h, q, k: 0.5 * s * (
            1.0 + jnp.tanh(np.sqrt(2 / np.pi).item() * (s + 0.044715 * s * s * s)))),
    Mod("tanh_scaled", lambda t: lambda s, b, h, q, k: t.astype(s.dtype) * jnp.tanh(s),
        floats=lambda T, S: ((),)),
    Mod("exp_log1p", lambda w: lambda s, b, h, q, k:
        s - of_head(w, h, s) * jnp.log1p(jnp.exp(-s)),
        lambda w: lambda s, b, h, q, k:
        s - whole(w, s.dtype) * jnp.log1p(jnp.exp(-s)), lambda T, S: ((H,),)),
    Mod("divide_and_modulo", lambda t: lambda s, b, h, q, k:
        s + t[(q // 3) % 4, k % 5].astype(s.dtype), floats=lambda T, S: ((4, 5),)),
    Mod("casts", lambda: lambda s, b, h, q, k:
        s + (q * k % 7).astype(jnp.uint8).astype(s.dtype) / 8
        - (q.astype(jnp.float32) / 4).astype(jnp.int32).astype(s.dtype) * 0.25),
    Mod("where", lambda t: lambda s, b, h, q, k:
        jnp.where((q + k) % 2 == 0, s, t[k % 3].astype(s.dtype)),
        floats=lambda T, S: ((3,),)),
    Mod("custom_jvp", lambda: lambda s, b, h, q, k: cube(0.7 * s),
        lambda: lambda s, b, h, q, k: (0.7 * s) * (0.7 * s) * (0.7 * s)),
    Mod("custom_vjp", lambda w: lambda s, b, h, q, k: halved_square(s, of_head(w, h, s)),
        lambda w: lambda s, b, h, q, k: 0.5 * s * s * whole(w, s.dtype),
        lambda T, S: ((H,),)),
    Mod("nested_jit", _nested_jit,
        lambda t: lambda s, b, h, q, k: jnp.sin(s) + t[(q + 2 * k) % 8].astype(s.dtype),
        lambda T, S: ((8,),)),
    Mod("partial", lambda t: functools.partial(_with_table, t, 0.5),
        lambda t: lambda s, b, h, q, k: s + 0.5 * t[(3 * q + k) % 9].astype(s.dtype),
        lambda T, S: ((9,),)),
    Mod("object", Tempered,
        lambda t, table: lambda s, b, h, q, k: s * (1.0 + whole(t, s.dtype) ** 2)
        + table[q % 7].astype(s.dtype), lambda T, S: ((H,), (7,))),
    Mod("fori_loop", _fori, _fori_plain, lambda T, S: ((3, 3),), dtype=jnp.float32),
    Mod("scan", _scan, _scan_plain, lambda T, S: ((4,),), dtype=jnp.float32),
    Mod("embedded", _embedded, _embedded_plain, lambda T, S: ((T, 3), (S, 3))),
    Mod("logsumexp_rows", _log_rows, _log_rows_plain, lambda T, S: ((6, 3),)),
    Mod("bias_of_rank_4", lambda bias: lambda s, b, h, q, k: s + bias[b, h, q, k].astype(
        s.dtype), lambda bias: lambda s, b, h, q, k: s + bias.astype(s.dtype),
        lambda T, S: ((B, H, T, S),)),
    Mod("partly_indexed", _partly,
        lambda bias: lambda s, b, h, q, k: s + bias[:, None].astype(s.dtype),
        lambda T, S: ((B, T, S),)),
    Mod("chained", _chained, _chained_plain, lambda T, S: ((6,),), _sequences),
    Mod("one_array_twice", lambda t: lambda s, b, h, q, k:
        s + (t[q % 8] * t[k % 8] - t[h]).astype(s.dtype), floats=lambda T, S: ((8,),)),
    Mod("views", _views, _views_plain, lambda T, S: ((4, 6),)),
    Mod("uint8_table", lambda scale, t: lambda s, b, h, q, k:
        s + of_head(scale, h, s) * t[q % 9, k % 5].astype(s.dtype) / 16,
        lambda scale, t: lambda s, b, h, q, k:
        s + whole(scale, s.dtype) * t[q % 9, k % 5].astype(s.dtype) / 16,
        lambda T, S: ((H,),), lambda T, S: (numbers(6, (9, 5), 32, np.uint8),)),
    Mod("bool_table", lambda t, flags: lambda s, b, h, q, k:
        jnp.where(flags[b, q % 4, k % 3], s, t.astype(s.dtype)),
        floats=lambda T, S: ((),),
        others=lambda T, S: (numbers(7, (B, 4, 3), 2, np.bool_),)),
    Mod("bfloat16_table", lambda t: lambda s, b, h, q, k:
        s + t[(q + k) % 6].astype(s.dtype), floats=lambda T, S: ((6,),),
        dtype=jnp.bfloat16),
    Mod("float32_table", lambda t: lambda s, b, h, q, k:
        s * t[k % 4].astype(s.dtype), floats=lambda T, S: ((4,),), dtype=jnp.float32),
    Mod("batch_and_head", lambda: lambda s, b, h, q, k:
        s * (1 + b + 2 * h).astype(s.dtype) / 4),
    Mod("without_score", lambda t: lambda s, b, h, q, k: t[h, k % 7].astype(s.dtype),
        floats=lambda T, S: ((H, 7),)),
    Mod("minus_infinity", lambda: lambda s, b, h, q, k:
        jnp.where((q % 4 == 3) | (k % 5 == 1), -jnp.inf, s)),
    Mod("query_alone", lambda t: lambda s, b, h, q, k: s + t[b, q % 5].astype(s.dtype),
        floats=lambda T, S: ((B, 5),)),
    Mod("waves", lambda f: lambda s, b, h, q, k:
        s * jnp.cos(of_head(f, h, s) * (q - k).astype(s.dtype) / 8),
        lambda f: lambda s, b, h, q, k:
        s * jnp.cos(whole(f, s.dtype) * (q - k).astype(s.dtype) / 8),
        lambda T, S: ((H,),)),
    Mod("switch", lambda: _switched, lambda: _switched_plain),
]  # fmt: skip
MODS = LIBRARY_MODS + WRITTEN_MODS


# --- mask_mods ------------------------------------------------------------------------


PACKED = np.array([[12, 0, 20], [1, 20, 16]], np.int32)  # leaves positions in none
STARTS = np.pad(np.cumsum(PACKED, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
TOTAL = 45


def _ids(T, S):
    return (jnp.sort(numbers(8, (B, max(T, S)), 4), axis=1),)


def _packed_plain(lengths, first=0):
    """Squares of documents that begin at `first`; what precedes them is seen by all."""

    def documents(x):
        place = np.arange(x.size)[None, :, None] - first
        number = (place >= np.cumsum(PACKED, axis=1)[:, None]).sum(-1)
        return np.where(place[..., 0] < 0, -1, number)

    def visible(b, h, q, k):
        rows, columns = documents(q)[:, :, None], documents(k)[:, None]
        none = rows == PACKED.shape[1]
        seen = (rows == columns) | ((columns == -1) & ~none)
        return jnp.asarray((seen & ~none)[:, None])

    return visible


def _grid_plain(sizes, kernels):
    def visible(b, h, q, k):
        rows, columns = (np.unravel_index(np.arange(x.size), sizes) for x in (q, k))
        seen = np.ones((q.size, k.size), bool)
        for i, j, n, width in zip(rows, columns, sizes, kernels, strict=True):
            start = np.clip(i - width // 2, 0, n - width)[:, None]
            seen &= (start <= j[None]) & (j[None] < start + width)
        return jnp.asarray(seen[None, None])

    return visible


def _diffused_plain(n, size):
    def visible(b, h, q, k):
        i, j = np.arange(q.size)[:, None], np.arange(k.size)[None]
        row, column = (i % n) // size, (j % n) // size
        noised = np.where(j < n, row == column, row > column)
        clean = (j >= n) & (row >= column)
        return jnp.asarray(np.where(i < n, noised, clean)[None, None])

    return visible


class Windowed:
    """A callable object that holds what it captures."""

    def __init__(self, widths):
        self.widths = widths

    def __call__(self, b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < self.widths[b, h]


def _jitted(limit):
    inside = jax.jit(lambda q, k: q * 2 >= k + limit)
    return lambda b, h, q, k: inside(q, k) | (k == 0)


def _at_least(limit, b, h, q, k):
    return (q + k) % 7 >= limit


def _codes(codes):
    """Keys whose code shares a bit with the query's."""
    return lambda b, h, q, k: (codes[q % 16] & codes[k % 16]) != 0


def _agree(rows):
    """A reduction over captured rows."""
    return lambda b, h, q, k: jnp.sum(rows[q % 5] * rows[k % 5]) > 0


def _agree_plain(rows):
    def visible(b, h, q, k):
        products = jnp.einsum("td,sd->ts", rows, rows, precision="highest")
        return (products > 0)[q % 5, k % 5]

    return visible


def _some_loops(b, h, q, k):
    """Whether the digits of q and k to base 2 differ in an even number of places."""
    bits = jax.lax.fori_loop(0, 8, lambda i, n: n + (((q ^ k) >> i) & 1), 0 * q)
    return bits % 2 == 0


def _some_loops_plain(b, h, q, k):
    return sum(((q ^ k) >> i) & 1 for i in range(8)) % 2 == 0


def _same(mask_mod, **options):
    """A mask without captured arrays whose expression reads the same for arrays."""
    return {"make": lambda: mask_mod, **options}


def ints(*values):
    return lambda T, S: (jnp.asarray(values, jnp.int32),)


LIBRARY_MASKS = [
    Mask("dense"),
    Mask("noop", lambda: masks.noop_mask,
         lambda: lambda b, h, q, k: (q == q) & (k == k)),
    Mask("causal", lambda: masks.causal, lambda: lambda b, h, q, k: k <= q),
    Mask("not_causal", lambda: masks.not_mask(masks.causal),
         lambda: lambda b, h, q, k: k > q),
    Mask("and", lambda: masks.and_masks(masks.causal, masks.dilated((9, 9), 2)),
         lambda: lambda b, h, q, k: (k <= q) & (q - k <= 18) & ((q - k) % 2 == 0)),
    Mask("or", lambda n: masks.or_masks(masks.causal, masks.padding(n)),
         lambda n: lambda b, h, q, k: (k <= q) | (k < n[b]), ints(9, 0), batch=True),
    Mask("with_offset", lambda n: masks.with_offset(masks.causal, n),
         lambda n: lambda b, h, q, k: k <= q + n[b], ints(5, -4), batch=True),
    Mask("sliding_window", lambda: masks.sliding_window(7),
         lambda: lambda b, h, q, k: (k <= q) & (q - k < 7)),
    Mask("window_of_data", lambda n: masks.sliding_window((n, 3)),
         lambda n: lambda b, h, q, k: (q - k <= n) & (k - q <= 3),
         lambda T, S: (jnp.int32(11),)),
    Mask("dilated", lambda: masks.dilated(5, 3),
         lambda: lambda b, h, q, k: (q - k >= 0) & (q - k < 15) & ((q - k) % 3 == 0)),
    Mask("prefix_lm", lambda n: masks.prefix_lm(n),
         lambda n: lambda b, h, q, k: (k <= q) | (k < n[b]), ints(3, 20), batch=True),
    Mask("global_and_window", lambda: masks.global_and_window(2, 6),
         lambda: lambda b, h, q, k: (abs(q - k) <= 3) | (q < 2) | (k < 2)),
    Mask("document_ids", masks.document,
         lambda ids: lambda b, h, q, k: ids[b, q] == ids[b, k], _ids, batch=True),
    Mask("document_lengths", lambda n: masks.document(lengths=n, total_length=TOTAL),
         _packed_plain, ints(*PACKED.tolist()), batch=True, lengths=(TOTAL, TOTAL)),
    Mask("cu_seqlens", lambda n: masks.document(cu_seqlens=n, total_length=TOTAL),
         _packed_plain, ints(*STARTS.tolist()), batch=True, lengths=(TOTAL, TOTAL)),
    Mask("shared_prefix",
         lambda n: masks.shared_prefix(4, lengths=n, total_length=TOTAL),
         lambda n: _packed_plain(n, 4), ints(*PACKED.tolist()), batch=True,
         lengths=(TOTAL, TOTAL)),
    Mask("padding", masks.padding, lambda n: lambda b, h, q, k: k < n[b], ints(40, 6),
         batch=True),
    Mask("block_diffusion", lambda: masks.block_diffusion(18, 4),
         lambda: _diffused_plain(18, 4), lengths=(36, 36)),
    Mask("image", lambda: masks.neighborhood_2d((5, 7), (3, 4)),
         lambda: _grid_plain((5, 7), (3, 4)), lengths=(35, 35)),
    Mask("volume", lambda: masks.neighborhood_3d((2, 3, 6), (2, 1, 3)),
         lambda: _grid_plain((2, 3, 6), (2, 1, 3)), lengths=(36, 36)),
]  # fmt: skip
WRITTEN_MASKS = [
    Mask("by_head", **_same(lambda b, h, q, k: (k <= q) & (q - k < 10 * (h + 1))),
         heads=True),
    Mask("by_batch_and_head",
         **_same(lambda b, h, q, k: (abs(q - k + 3 * b) <= 4 + 2 * h) | (k == 0)),
         batch=True, heads=True),
    Mask("empty_rows", **_same(lambda b, h, q, k: (q % 3 == 0) & (k <= q))),
    Mask("empty_sequence", **_same(lambda b, h, q, k: (b == 1) & (k <= q)), batch=True),
    Mask("empty_group", **_same(lambda b, h, q, k: (h >= 2) & (k >= 0) & (q >= 0)),
         heads=True),
    Mask("empty", **_same(lambda b, h, q, k: (k < 0) & (q < 0))),
    Mask("checkerboard", **_same(lambda b, h, q, k: (q // 3 + k // 2 + h) % 2 == 0),
         heads=True),
    Mask("table", lambda t: lambda b, h, q, k: t[q % 9][k % 11],
         lambda t: lambda b, h, q, k: t[q % 9, k % 11],
         lambda T, S: (numbers(9, (9, 11), 2, np.bool_),)),
    Mask("table_of_rank_4", lambda t: lambda b, h, q, k: t[b, h, q, k] > 40,
         lambda t: lambda b, h, q, k: t > 40,
         lambda T, S: (numbers(10, (B, H, T, S), 100, np.uint8),), batch=True,
         heads=True),
    Mask("chained_ids", lambda kind, ids: lambda b, h, q, k:
         kind[ids[b, q]] >= kind[ids[b][k]],
         lambda kind, ids: lambda b, h, q, k: kind[ids[b, q]] >= kind[ids[b, k]],
         lambda T, S: (jnp.asarray([2, 0, 1, 0], jnp.int32), *_ids(T, S)), batch=True),
    Mask("bits", _codes, None, lambda T, S: (numbers(11, (16,), 16, np.uint8),)),
    Mask("reduced_rows", _agree, _agree_plain,
         lambda T, S: (gaussian(12, (5, 3)),)),
    Mask("jitted", _jitted, lambda n: lambda b, h, q, k: (q * 2 >= k + n) | (k == 0),
         lambda T, S: (jnp.int32(5),)),
    Mask("partial", lambda: functools.partial(_at_least, 3)),
    Mask("object", Windowed,
         lambda n: lambda b, h, q, k: abs(q - k) < n[b, h],
         lambda T, S: (numbers(13, (B, H), 30),), batch=True, heads=True),
    Mask("loop", lambda: _some_loops, lambda: _some_loops_plain),
]  # fmt: skip
MASKS = LIBRARY_MASKS + WRITTEN_MASKS
