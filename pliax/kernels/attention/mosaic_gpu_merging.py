"""Parts of the keys as one result, as `merging.merge`, in one kernel of Mosaic GPU.

A thread block has a row of queries of a key head, each of its threads some channels.
The parts of a row are loaded many at once, and each joins those before it:

    m' = max(m, m_i),  l = l exp(m - m') + l_i exp(m_i - m'),  o likewise

Results are written where users want them, the heads of a tile apart again: XLA would
merge in two kernels and move heads in a third (one H200, 128 parts of 8 rows of two
heads, 128 channels: 3.6 us instead of 5.6, and about 1 more for each start).
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pliax.core._jax import store_registers

from .mosaic_gpu_tiles import ROW, i32
from .row_statistics import LOG2E


# Registers of a thread for parts that are on their way together: 64 parts where it has
# one channel. By 16 and 32 it would take 4.6 and 4.0 us instead of 3.6, as above.
_REGISTERS = 64
_THREADS = 128


class Parts(NamedTuple):
    """Sums over parts of the keys, for rows of which some may be behind the last query.

    Attributes:
        out: Unnormalised outputs.
        maximum: Of scores; of more such rows.
        total: Sums of weights; likewise.
    """

    out: Float[Array, "P B K R V"]
    maximum: Float[Array, "P B K R2"]
    total: Float[Array, "P B K R2"]


def merge(
    parts: Parts, queries: int, group: int, dtype: Any, *, interpret: bool
) -> tuple[Array, Array, Array, Array]:
    """All parts as one result, and what was rows of key heads as query heads.

    Args:
        parts: Row t G + g of key head n is query t of head n G + g.
        queries: How many there are, T.
        group: Query heads of a key head, G.
        dtype: Of the output.
        interpret: Whether JAX's interpreter runs the kernel.

    Returns:
        Output (B, T, H, V), log-sum-exp, maximum and logarithm of the sum (B, T, H).
    """
    _, B, K, _, V = parts.out.shape
    shape = B, queries, K * group
    statistic = jax.ShapeDtypeStruct(shape, jnp.float32)
    kw: Any = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    run = plgpu.kernel(
        partial(_merge_row, group),
        out_type=[jax.ShapeDtypeStruct((*shape, V), dtype), *[statistic] * 3],
        grid=(B * queries * K * group,),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **kw,
    )
    return tuple(run(*parts))


def _merge_row(group: int, *refs: Any) -> None:
    """What a thread block does; `refs` are the fields of `Parts`, then the results."""
    parts, (out, *statistics) = Parts(*refs[:3]), refs[3:]
    b, t, h = _place(lax.axis_index("rows"), out.shape[:3])
    row = b, lax.div(h, i32(group)), t * i32(group) + lax.rem(h, i32(group))
    acc, top, total = _sum(parts, row)
    some = jnp.where(total == 0, 1.0, total)
    store_registers(out.at[b, t, h], (acc * (1 / some)).astype(out.dtype))
    log_sum = jnp.log2(some) * (1 / LOG2E)
    for ref, x in zip(statistics, (top + log_sum, top, log_sum), strict=True):
        ref[b, t, h] = x


def _place(n: Any, sizes: Sequence[int]) -> tuple[Any, Any, Any]:
    """The n-th of all sequences, queries and heads, the heads of a query together."""
    _, T, H = map(i32, sizes)
    query, h = lax.div(n, H), lax.rem(n, H)
    return lax.div(query, T), lax.rem(query, T), h


def at_once(channels: int) -> int:
    """Parts whose loads are on their way together."""
    copies = 1 if channels % _THREADS == 0 else 4  # threads that have the same channel
    return max(1, _REGISTERS * _THREADS // (channels * copies))


def _sum(parts: Parts, row: Any) -> tuple[Any, Any, Any]:
    """Unnormalised output, maximum and sum of a row."""
    (count, *_, V), step = parts.out.shape, partial(_join_parts, parts, row)
    layout = plgpu.Layout.WG_STRIDED((V,), 1) if V % _THREADS == 0 else ROW
    zero = plgpu.layout_cast(jnp.zeros(V, jnp.float32), layout)
    carry, many = (zero, jnp.float32(-jnp.inf), jnp.float32(0)), at_once(V)
    whole, rest = divmod(count, many)
    join_many = lambda n, carry: step(n * many, many, layout, carry)  # noqa: E731
    carry = lax.fori_loop(i32(0), i32(whole), join_many, carry)
    return step(i32(whole * many), rest, layout, carry) if rest else carry


def _join_parts(
    parts: Parts, row: Any, first: Any, count: int, layout: Any, carry: Any
) -> tuple[Any, Any, Any]:
    """So many parts join those before them."""
    numbers = [first + n for n in range(count)]
    load: Any = partial(plgpu.load, layout=layout, optimized=False)
    outs = [load(parts.out.at[(n, *row)]) for n in numbers]
    rest = [(parts.maximum[(n, *row)], parts.total[(n, *row)]) for n in numbers]
    found = [(out, *statistics) for out, statistics in zip(outs, rest, strict=True)]
    return join([carry, *found], lambda share: share)


def join(
    parts: Sequence[tuple[Any, Any, Any]], spread: Callable[[Any], Any]
) -> tuple[Any, Any, Any]:
    """Output, maximum and sum of several parts together.

    Args:
        parts: The same three of each part, in registers: of one row, or of a tile.
        spread: From a number for each row to one for each of its channels.
    """
    top = functools.reduce(jnp.maximum, [maximum for _, maximum, _ in parts])
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    shares = [jnp.exp2((maximum - shift) * LOG2E) for _, maximum, _ in parts]
    outs = [out * spread(x) for (out, _, _), x in zip(parts, shares, strict=True)]
    totals = [total * x for (*_, total), x in zip(parts, shares, strict=True)]
    return functools.reduce(add, outs), top, functools.reduce(add, totals)
