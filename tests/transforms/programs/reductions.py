"""Reductions and prefix sums over a symbolic axis, over its batch, over both."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ._program import Program, program, table


_AXES = ((None, "axis=None"), (0, "axis=0"), (-1, "axis=-1"))

_SUMS = "sum mean std var nansum nanmean nanstd nanvar cumsum nancumsum trapezoid"
_PRODUCTS = "prod nanprod cumprod nancumprod"
_ORDER = "max min amax amin argmax argmin ptp nanmax nanmin nanargmax nanargmin minmax"
_MIDDLE = "median nanmedian"
_TRUTH = "all any"
_RANKS = "quantile percentile nanquantile nanpercentile"


def _over_axes(names: str, spec: str, *, exact: bool = False) -> list[Program]:
    """Each function over all elements, over the first axis, over the last."""
    return [
        program(
            f"jnp.{name}[{text}]",
            functools.partial(getattr(jnp, name), axis=axis),
            spec,
            exact=exact,
        )
        for name in names.split()
        for axis, text in _AXES
        if hasattr(jnp, name) and not (name == "trapezoid" and axis is None)
    ]


def _ranks(names: str) -> list[Program]:
    """Quantiles at two levels; a level and a percentage are both in range at 0.3."""
    q = (0.3, 0.75)
    return [
        program(
            f"jnp.{name}[{text}]",
            functools.partial(
                lambda f, axis, x: f(x, jnp.array(q), axis=axis),
                getattr(jnp, name),
                axis,
            ),
            "b, t",
        )
        for name in names.split()
        for axis, text in _AXES
    ]


def _with_nans(x: jax.Array) -> jax.Array:
    """Some elements become NaN; the first of each row never does."""
    return jnp.where(x > 1.0, jnp.nan, x).at[..., 0].set(0.5)


def _nan_programs() -> list[Program]:
    names = "nansum nanmean nanmax nanargmax nancumsum nanmedian nanvar max argmax sum"
    return [
        program(
            f"jnp.{name}[axis=-1, NaNs in the data]",
            functools.partial(
                lambda f, x: f(_with_nans(x), axis=-1), getattr(jnp, name)
            ),
            "b, t",
        )
        for name in names.split()
    ]


# fmt: off
_VARIANTS = [
    ("jnp.sum[keepdims]", lambda x: x - x.sum(-1, keepdims=True), "b, t"),
    ("jnp.sum[where]", lambda x, m: jnp.sum(x, -1, where=m), "b, t", "b, t; boolean"),
    ("jnp.sum[axis=(0, 2)]", lambda x: jnp.sum(x, (0, 2)), "b, 3, t"),
    ("jnp.sum[scalar of vector]", jnp.sum, "t"),
    ("jnp.sum[bfloat16]", lambda x: jnp.sum(x, axis=0), "t, 4; bfloat16"),
    ("jnp.sum[of exp]", lambda x: jnp.exp(x).sum(0), "t, 3"),
    ("jnp.sum[complex]", lambda x: jnp.sum(x, axis=-1), "b, t; complex64"),
    ("jnp.sum[initial]", lambda x: jnp.sum(x, initial=3.0), "t"),
    ("jnp.mean[where]", lambda x: jnp.mean(x, where=x > -2.0), "t"),
    ("jnp.mean[centre]", lambda x: x - x.mean(axis=0), "t"),
    ("jnp.var[ddof=1]", lambda x: jnp.var(x, ddof=1), "t", "t >= 2"),
    ("jnp.std[normalize]", lambda x: (x - x.mean()) / (x.std() + 1e-3), "b, t"),
    ("jnp.average[plain]", lambda x: jnp.average(x, axis=0), "t, 3"),
    ("jnp.average[weights]", lambda x, w: jnp.average(x, weights=w), "t", "t; positive"),
    ("jnp.cumulative_sum[t]", jnp.cumulative_sum, "t"),
    ("jnp.cumulative_sum[include_initial]", lambda x: _from_zero(x), "b, t"),
    ("jnp.cumulative_prod[t]", jnp.cumulative_prod, "t; unit"),
    ("jnp.cumsum[reversed]", lambda x: jnp.cumsum(x[::-1])[::-1], "t"),
    ("jnp.corrcoef[rows]", jnp.corrcoef, "b, t", "t >= 3"),
    ("jnp.cov[rows]", jnp.cov, "b, t", "t >= 2"),
    ("jnp.cov[columns]", lambda x: jnp.cov(x, rowvar=False), "t, 3", "t >= 2"),
    ("jnp.trapezoid[points]", lambda y, x: jnp.trapezoid(y, x), "t", "t; sorted"),
    ("jnp.trace[b, t]", jnp.trace, "b, t"),
    ("jnp.trace[offset]", lambda x: jnp.trace(x, offset=1), "t, t"),
    ("lax.reduce_sum[axes=0,1]", lambda x: lax.reduce_sum(x, (0, 1)), "b, t"),
    ("lax.reduce_prod[axis=1]", lambda x: lax.reduce_prod(x, (1,)), "b, t; unit"),
    ("lax.cumsum[axis=1]", lambda x: lax.cumsum(x, axis=1), "b, t"),
    ("lax.cumsum[reverse]", lambda x: lax.cumsum(x, reverse=True), "t"),
    ("lax.cumprod[axis=0]", lax.cumprod, "t; unit"),
    ("lax.cumlogsumexp[axis=0]", lax.cumlogsumexp, "t, 3"),
    (
        "lax.cumlogsumexp[reverse]",
        lambda x: lax.cumlogsumexp(x, axis=1, reverse=True),
        "b, t",
    ),
    (
        "lax.reduce[add of product]",
        lambda x: lax.reduce(x, 1.0, lax.mul, (0,)),
        "t, 3; unit",
    ),
    ("lax.reduce[log-add-exp]", lambda x: _log_add(x), "b, t"),
]
_EXACT = [
    ("jnp.sum[int32]", lambda x: jnp.sum(x, axis=-1), "b, t; integer"),
    ("jnp.sum[mask]", lambda m: jnp.sum(m, dtype=jnp.int32), "b, t; boolean"),
    ("jnp.prod[uint32 wraps]", jnp.prod, "t; uint32; index:9"),
    ("jnp.cumsum[int32]", jnp.cumsum, "t; integer"),
    ("jnp.max[initial]", lambda x: jnp.max(x, initial=-1.0), "t"),
    ("jnp.max[where]", lambda x: jnp.max(x, where=x < 1.0, initial=-9.0), "b, t"),
    ("jnp.max[negative numbers]", lambda x: jnp.max(-jnp.abs(x) - 1.0), "b, t"),
    ("jnp.min[positive integers]", lambda x: jnp.min(x + 10, 0), "t; integer"),
    ("jnp.argmax[ties]", lambda x: jnp.argmax(x, axis=-1), "b, t; integer"),
    ("jnp.argmin[all elements]", jnp.argmin, "b, t"),
    ("jnp.argmax[keepdims]", lambda x: jnp.argmax(x, 0, keepdims=True), "b, t"),
    ("jnp.count_nonzero[axis=0]", lambda x: jnp.count_nonzero(x, 0), "t, 3; integer"),
    ("jnp.count_nonzero[all]", jnp.count_nonzero, "b, t; integer"),
    ("jnp.diff[axis=-1]", jnp.diff, "b, t"),
    ("jnp.diff[n=2]", lambda x: jnp.diff(x, n=2), "t", "t >= 3"),
    ("jnp.diff[prepend]", lambda x: jnp.diff(x, prepend=x[:1]), "t"),
    ("jnp.ediff1d[to_begin]", lambda x: jnp.ediff1d(x, to_begin=x[:1]), "t"),
    ("jnp.array_equal[t]", jnp.array_equal, "t; integer", "t; integer"),
    ("jnp.array_equiv[t]", jnp.array_equiv, "t; integer", "t; integer"),
    ("jnp.allclose[b, t]", jnp.allclose, "b, t", "b, t"),
    ("jnp.fmax & jnp.max[chain]", lambda x, y: jnp.fmax(x, y).max(), "t", "t"),
    ("lax.reduce_max[axis=0]", lambda x: lax.reduce_max(x, (0,)), "t, 3"),
    ("lax.reduce_min[axis=1]", lambda x: lax.reduce_min(x, (1,)), "b, t"),
    ("lax.reduce_and[mask]", lambda x: lax.reduce_and(x, (0,)), "t, 3; boolean"),
    ("lax.reduce_or[mask]", lambda x: lax.reduce_or(x, (1,)), "b, t; boolean"),
    ("lax.reduce_xor[int]", lambda x: lax.reduce_xor(x, (0,)), "t; integer"),
    ("lax.argmax[axis=1]", lambda x: lax.argmax(x, 1, jnp.int32), "b, t"),
    ("lax.argmin[axis=0]", lambda x: lax.argmin(x, 0, jnp.int32), "t, 3"),
    ("lax.cummax[axis=1]", lambda x: lax.cummax(x, axis=1), "b, t"),
    ("lax.cummin[reverse]", lambda x: lax.cummin(x, axis=0, reverse=True), "t"),
    ("lax.reduce[max and its place]", lambda x: _max_and_place(x), "t"),
    ("lax.reduce[bitwise_or]", lambda x: lax.reduce(x, 0, lax.bitwise_or, (0,)), "t; integer"),
    ("jnp.maximum.reduce", lambda x: jnp.maximum.reduce(x, axis=0), "t, 3"),
    ("jnp.add.accumulate[int]", lambda x: jnp.add.accumulate(x), "t; integer"),
    ("jnp.bincount[length=8]", lambda x: jnp.bincount(x, length=8), "t; index:8"),
    ("jnp.histogram[edges]", lambda x: jnp.histogram(x, jnp.linspace(-2.0, 2, 9))[0], "t"),
]
_HISTOGRAMS = [
    (
        "jnp.bincount[weights, symbolic length]",
        lambda x, w: jnp.bincount(x, w, length=w.shape[0]),
        "t; index:t",
        "t",
    ),
    ("jnp.histogram[bins=10]", jnp.histogram, "t"),
    ("jnp.histogram[weights, density]", lambda x, w: _density(x, w), "t", "t; positive"),
    ("jnp.histogram_bin_edges[t]", lambda x: jnp.histogram_bin_edges(x, 5), "b, t"),
    ("jnp.histogram2d[t]", lambda x, y: jnp.histogram2d(x, y, bins=4), "t", "t"),
    ("jnp.histogramdd[t, 2]", lambda x: jnp.histogramdd(x, bins=3), "t, 2"),
    ("jnp.gradient[axis=0]", lambda x: jnp.gradient(x, axis=0), "t, 3", "t >= 2"),
    ("jnp.gradient[both axes]", jnp.gradient, "b, t", "b >= 2", "t >= 2"),
    ("jnp.unwrap[t]", lambda x: jnp.unwrap(x * 4.0), "t"),
    ("jnp.apply_along_axis[cumsum]", lambda x: _along(x), "b, t"),
    ("jnp.apply_over_axes[sum]", lambda x: jnp.apply_over_axes(jnp.sum, x, [0, 1]), "b, t"),
    ("jnp.add.reduce[axis=1]", lambda x: jnp.add.reduce(x, axis=1), "b, t"),
    ("jnp.multiply.accumulate", lambda x: jnp.multiply.accumulate(x), "t; unit"),
    ("jnp.add.reduceat", lambda x: jnp.add.reduceat(x, jnp.array([0, 2])), "t", "t >= 3"),
]
# fmt: on


def _from_zero(x: jax.Array) -> jax.Array:
    return jnp.cumulative_sum(x, axis=1, include_initial=True)


def _log_add(x: jax.Array) -> jax.Array:
    return lax.reduce(x, -jnp.inf, jnp.logaddexp, (1,))


def _max_and_place(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def better(left, right):
        keep = left[0] >= right[0]
        return tuple(jnp.where(keep, u, v) for u, v in zip(left, right, strict=True))

    places = lax.iota(jnp.int32, x.shape[0])
    return lax.reduce((x, places), (-jnp.inf, -1), better, (0,))


def _density(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.histogram(x, jnp.linspace(-2.0, 2.0, 6), weights=w, density=True)[0]


def _along(x: jax.Array) -> jax.Array:
    return jnp.apply_along_axis(jnp.cumsum, 1, x)


PROGRAMS = (
    *_over_axes(_SUMS, "b, t"),
    *_over_axes(_PRODUCTS, "b, t; unit"),
    *_over_axes(_ORDER, "b, t", exact=True),
    *_over_axes(_MIDDLE, "b, t"),
    *_over_axes(_TRUTH, "b, t; boolean", exact=True),
    *_ranks(_RANKS),
    *_nan_programs(),
    *table("", _VARIANTS),
    *table("", _EXACT, exact=True),
    *table("", _HISTOGRAMS),
)
