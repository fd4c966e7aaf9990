"""Order: sorting, selection, ranks, sets; ties and stability included."""

import jax
import jax.numpy as jnp
import jax.scipy.stats
from jax import lax

from ._program import program, table


# fmt: off
_SORTS = [
    ("sort[t]", jnp.sort, "t"),
    ("sort[axis=0]", lambda x: jnp.sort(x, axis=0), "t, 3"),
    ("sort[axis=-1]", jnp.sort, "b, t"),
    ("sort[axis=None]", lambda x: jnp.sort(x, axis=None), "b, t"),
    ("sort[descending]", lambda x: jnp.sort(x, descending=True), "b, t"),
    ("sort[integers]", jnp.sort, "b, t; integer"),
    ("sort[uint8]", jnp.sort, "t; uint8; index:250"),
    ("sort[booleans]", jnp.sort, "t; boolean"),
    ("sort[bfloat16]", jnp.sort, "t; bfloat16"),
    ("sort[NaNs in the data]", lambda x: jnp.sort(jnp.where(x > 0.5, jnp.nan, x)), "t"),
    ("sort[infinities in the data]", lambda x: jnp.sort(jnp.where(x > 0, jnp.inf, x)), "t"),
    ("sort_complex[t]", jnp.sort_complex, "t; complex64"),
    ("argsort[t]", jnp.argsort, "t"),
    ("argsort[axis=0]", lambda x: jnp.argsort(x, axis=0), "t, 3"),
    ("argsort[ties]", jnp.argsort, "b, t; integer"),
    ("argsort[descending, ties]", lambda x: jnp.argsort(x, descending=True), "t; integer"),
    ("argsort[ranks]", lambda x: jnp.argsort(jnp.argsort(x)), "t"),
    ("argsort[infinities]", lambda x: jnp.argsort(jnp.where(x > 0, jnp.inf, x)), "t"),
    ("argsort & take[gather]", lambda x, y: y[jnp.argsort(x)], "t", "t, 3"),
    ("lexsort[two keys]", lambda x, y: jnp.lexsort((x, y)), "t", "t; integer"),
    ("partition[kth=1]", lambda x: jnp.sort(jnp.partition(x, 1)[..., :2]), "b, t", "t >= 2"),
    ("argpartition[kth=1]", lambda x: jnp.sort(jnp.argpartition(x, 1)[:2]), "t", "t >= 2"),
    ("top_k[3]", lambda x: jnp.top_k(x, 3), "b, t", "t >= 3"),
    ("unique[size=4]", lambda x: jnp.unique(x, size=4), "t; integer"),
    ("unique[size=t, counts]", lambda x: jnp.unique(x, size=x.shape[0], return_counts=True), "t; integer"),
    ("unique[inverse]", lambda x: jnp.unique(x, size=5, fill_value=9, return_inverse=True), "t; integer"),
    ("unique[index]", lambda x: jnp.unique(x, size=6, return_index=True), "t; integer"),
    ("unique[rows]", lambda x: jnp.unique(x, size=3, axis=0), "t, 2; integer"),
    ("unique_values[t]", lambda x: jnp.unique_values(x, size=5), "t; integer"),
    ("unique_counts[t]", lambda x: jnp.unique_counts(x, size=5), "t; integer"),
    ("unique_inverse[t]", lambda x: jnp.unique_inverse(x, size=11), "t; integer"),
    ("unique_all[t]", lambda x: jnp.unique_all(x, size=11), "t; integer"),
    ("union1d[s, t]", lambda x, y: jnp.union1d(x, y, size=11), "s; integer", "t; integer"),
    ("intersect1d[s, t]", lambda x, y: jnp.intersect1d(x, y, size=6), "s; integer", "t; integer"),
    ("setdiff1d[s, t]", lambda x, y: jnp.setdiff1d(x, y, size=6, fill_value=-9), "s; integer", "t; integer"),
    ("setxor1d[s, t]", lambda x, y: jnp.setxor1d(x, y, size=11), "s; integer", "t; integer"),
    ("median[integers]", lambda x: jnp.median(x, axis=0, keepdims=True), "t, 3; integer"),
    ("quantile[lower]", lambda x: jnp.quantile(x, 0.4, method="lower"), "t"),
    ("quantile[nearest, axis=0]", lambda x: jnp.quantile(x, 0.6, axis=0, method="nearest"), "t, 3"),
    ("argmax & sort[least of the greatest]", lambda x: jnp.sort(x)[jnp.argmax(x)], "t"),
    ("searchsorted & sort[ranks]", lambda x: jnp.searchsorted(jnp.sort(x), x), "t"),
    ("cumsum & argsort[group by key]", lambda x: jnp.cumsum(x)[jnp.argsort(x)], "t; integer"),
]
_LAX = [
    ("sort[dimension 0]", lambda x: lax.sort(x, dimension=0), "t, 3"),
    ("sort[two operands]", lambda x, y: lax.sort((x, y), num_keys=1), "t; integer", "t"),
    ("sort[two keys]", lambda x, y: lax.sort((x, y), num_keys=2), "b, t; integer", "b, t"),
    ("sort[unstable]", lambda x: lax.sort(x, is_stable=False), "b, t"),
    ("sort_key_val[t]", lax.sort_key_val, "t", "t; integer"),
    ("sort_key_val[b, t]", lambda x, y: lax.sort_key_val(x, y, dimension=0), "t, 2; integer", "t, 2"),
    ("top_k[2]", lambda x: lax.top_k(x, 2), "b, t", "t >= 2"),
    ("top_k[ties]", lambda x: lax.top_k(x, 3), "t; integer", "t >= 3"),
    ("top_k[axis=0]", lambda x: lax.top_k(x, 2, axis=0), "t, 3", "t >= 2"),
    ("top_k[k=t]", lambda x: lax.top_k(x, x.shape[0]), "t"),
    ("top_k[batch only]", lambda x: lax.top_k(x, 2), "b, 5"),
    ("approx_max_k[2]", lambda x: lax.approx_max_k(x, 2), "b, t", "t >= 2"),
    ("approx_min_k[2]", lambda x: lax.approx_min_k(x, 2), "t", "t >= 2"),
]
_STATS = [
    ("scipy.stats.rankdata[average]", jax.scipy.stats.rankdata, "t; integer"),
    ("scipy.stats.rankdata[dense]", lambda x: jax.scipy.stats.rankdata(x, "dense"), "t; integer"),
    ("scipy.stats.rankdata[axis=1]", lambda x: jax.scipy.stats.rankdata(x, axis=1), "b, t"),
    ("scipy.stats.mode[t]", jax.scipy.stats.mode, "t; integer"),
    ("scipy.stats.mode[axis=1]", lambda x: jax.scipy.stats.mode(x, axis=1), "b, t; integer"),
]
# fmt: on


def _top_p(logits: jax.Array) -> jax.Array:
    """Nucleus filtering: keep the likeliest tokens that make up 0.9."""
    order = jnp.argsort(-logits, axis=-1)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, -1), axis=-1)
    kept = jnp.cumsum(p, axis=-1) - p < 0.9
    places = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(kept, places, -1), logits, -jnp.inf)


def _non_maximum(x: jax.Array) -> jax.Array:
    """Peaks of a line: elements greater than both neighbours."""
    padded = jnp.pad(x, 1, constant_values=-jnp.inf)
    return (x > padded[:-2]) & (x > padded[2:])


def _trimmed_mean(x: jax.Array) -> jax.Array:
    ordered = jnp.sort(x)
    cut = x.shape[0] // 4
    return ordered[cut : x.shape[0] - cut].mean()


def _compact(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Kept elements first, in order: a stable sort by the mask."""
    _, moved = lax.sort((~keep, x), num_keys=1, is_stable=True)
    return moved


PROGRAMS = (
    *table("jnp.", _SORTS, exact=True),
    *table("lax.", _LAX, exact=True),
    *table("", _STATS, exact=True),
    program("sort: top-p filter", _top_p, "b, t"),
    program("sort: peaks", _non_maximum, "t", exact=True),
    program("sort: trimmed mean", _trimmed_mean, "t"),
    program("sort: compaction", _compact, "t", "t; boolean", exact=True),
)
