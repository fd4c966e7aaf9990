"""Reading and writing at positions: slices, gathers, scatters, segments, masks."""

import jax
import jax.numpy as jnp
from jax import lax

from ._program import table


# fmt: off
_SLICES = [
    ("x[0]", lambda x: x[0], "t, 3"),
    ("x[-1]", lambda x: x[-1], "t, 3"),
    ("x[..., -1]", lambda x: x[..., -1], "b, t"),
    ("x[:-1]", lambda x: x[:-1], "t"),
    ("x[1:]", lambda x: x[1:], "t"),
    ("x[1:-1]", lambda x: x[1:-1], "b, t", "b >= 2"),
    ("x[:2]", lambda x: x[:2], "t", "t >= 2"),
    ("x[-2:]", lambda x: x[-2:], "t", "t >= 2"),
    ("x[::2]", lambda x: x[::2], "t"),
    ("x[1::2]", lambda x: x[1::2], "t"),
    ("x[::3]", lambda x: x[:, ::3], "b, t"),
    ("x[::-1]", lambda x: x[::-1], "t, 3"),
    ("x[::-2]", lambda x: x[::-2], "t"),
    ("x[:t//2]", lambda x: x[: x.shape[0] // 2], "t", "t >= 2"),
    ("x[t//2]", lambda x: x[x.shape[0] // 2], "t"),
    ("x[t//2:]", lambda x: x[x.shape[0] // 2 :], "t"),
    ("x[b:] of another size", lambda x, y: y[x.shape[0] :], "b", "b + t"),
    ("x[:b] of another size", lambda x, y: y[: x.shape[0]] * x, "b", "b + t"),
    ("x[:, None]", lambda x: x[:, None], "t"),
    ("x[i] of a traced scalar", lambda x, i: x[i], "t, 3", "; index:t"),
    ("x[i] of traced indices", lambda x, i: x[i], "t, 3", "s; index:t"),
    ("x[-i] of negative indices", lambda x, i: x[-i - 1], "t", "s; index:t"),
    ("x[i, j]", lambda x, i, j: x[i, j], "b, t", "s; index:b", "s; index:t"),
    ("x[:, i]", lambda x, i: x[:, i], "b, t", "s; index:t"),
    ("x[i] of an index matrix", lambda x, i: x[i], "t, 3", "b, s; index:t"),
    ("x[i] out of bounds clamps", lambda x: x[jnp.array([0, 40])], "t"),
    ("x[arange, argmax]", lambda x: x[jnp.arange(x.shape[0]), x.argmax(1)], "b, t"),
    ("x[:-1] + x[1:]", lambda x: x[:-1] + x[1:], "t"),
    ("x[1:] - x[:-1] over rows", lambda x: x[:, 1:] - x[:, :-1], "b, t"),
]
_AT = [
    ("at[0].set", lambda x: x.at[0].set(7.0), "t"),
    ("at[-1].add", lambda x: x.at[-1].add(1.0), "t, 3"),
    ("at[1:].set", lambda x: x.at[1:].set(x[:-1]), "t"),
    ("at[::2].mul", lambda x: x.at[::2].mul(2.0), "t"),
    ("at[:, -1].set", lambda x, y: x.at[:, -1].set(y), "b, t", "b"),
    ("at[i].set unique", lambda x, i: x.at[i].set(x * 2.0), "t", "t; permutation"),
    ("at[i].max", lambda x, i, v: x.at[i].max(v), "t", "s; index:t", "s"),
    ("at[i].min", lambda x, i, v: x.at[i].min(v), "t, 3", "s; index:t", "s, 3"),
    ("at[i].add int", lambda x, i: x.at[i].add(1), "t; integer", "s; index:t"),
    ("at[i].get fill", lambda x, i: x.at[i * 2].get(mode="fill", fill_value=-1.0), "t", "s; index:t"),
    ("at[i].get clip", lambda x, i: x.at[i * 2].get(mode="clip"), "t", "s; index:t"),
    ("at[i].set drop", lambda x, i: x.at[i + x.shape[0]].set(9.0, mode="drop"), "t", "s; index:t"),
    ("at[i].apply", lambda x, i: x.at[i].apply(jnp.abs), "t", "; index:t"),
    ("at[i, j].set", lambda x: x.at[jnp.arange(x.shape[0]), 0].set(5.0), "b, t"),
]
_AT_SUMS = [
    ("at[i].add duplicates", lambda x, i, v: x.at[i].add(v), "t", "s; index:t", "s"),
    ("at[i].add rows", lambda x, i, v: x.at[i].add(v), "t, 3", "s; index:t", "s, 3"),
    ("at[i].mul", lambda x, i, v: x.at[i].mul(v), "t", "s; index:t", "s; positive"),
    ("at[i, j].add", lambda x, i, j: x.at[i, j].add(0.5), "b, t", "s; index:b", "s; index:t"),
]
_JNP = [
    ("take[axis=0]", lambda x, i: jnp.take(x, i, axis=0), "t, 3", "s; index:t"),
    ("take[axis=1, wrap]", lambda x, i: jnp.take(x, i * 3, axis=1, mode="wrap"), "b, t", "s; index:t"),
    ("take[flat]", lambda x, i: jnp.take(x, i), "b, t", "s; index:b*t"),
    ("take[out of bounds is NaN]", lambda x, i: jnp.nan_to_num(jnp.take(x, i * 2)), "t", "s; index:t"),
    ("take_along_axis[axis=1]", lambda x, i: jnp.take_along_axis(x, i, 1), "b, t", "b, s; index:t"),
    ("take_along_axis[argsort]", lambda x: jnp.take_along_axis(x, x.argsort(0), 0), "t, 3"),
    ("put_along_axis[axis=1]", lambda x, i: jnp.put_along_axis(x, i, 0.0, 1, inplace=False), "b, t", "b, 1; index:t"),
    ("put[t]", lambda x, i: jnp.put(x, i, 2.0, inplace=False), "t", "s; index:t"),
    ("place[t]", lambda x, m: jnp.place(x, m, jnp.array([1.0, 2.0]), inplace=False), "t", "t; boolean"),
    ("insert[at 0]", lambda x: jnp.insert(x, 0, 5.0), "t"),
    ("insert[at the middle]", lambda x: jnp.insert(x, x.shape[0] // 2, 5.0), "t"),
    ("delete[first]", lambda x: jnp.delete(x, 0), "t"),
    ("delete[traced index]", lambda x, i: jnp.delete(x, i[None], assume_unique_indices=True), "t", "; index:t"),
    ("append[row]", lambda x: jnp.append(x, x[:1], axis=0), "t, 3"),
    ("compress[size]", lambda x, m: jnp.compress(m, x, size=4), "t", "t; boolean", "t >= 4"),
    ("extract[size]", lambda x, m: jnp.extract(m, x, size=x.shape[0]), "t", "t; boolean"),
    ("nonzero[size=4]", lambda m: jnp.nonzero(m, size=4, fill_value=-1), "t; boolean"),
    ("nonzero[size=t]", lambda m: jnp.nonzero(m, size=m.shape[0]), "t; boolean"),
    ("nonzero[matrix]", lambda m: jnp.nonzero(m, size=5), "b, t; boolean"),
    ("flatnonzero[size]", lambda m: jnp.flatnonzero(m, size=6), "b, t; boolean"),
    ("argwhere[size]", lambda m: jnp.argwhere(m, size=4), "b, t; boolean"),
    ("where[size]", lambda m: jnp.where(m, size=3, fill_value=0), "t; boolean"),
    ("ix_[b, t]", lambda x: x[jnp.ix_(jnp.arange(x.shape[0])[::-1], jnp.array([0]))], "b, t"),
    ("searchsorted[t, s]", jnp.searchsorted, "t; sorted", "s"),
    ("searchsorted[right, scalar]", lambda x, v: jnp.searchsorted(x, v, side="right"), "t; sorted", ""),
    ("searchsorted[scan_unrolled]", lambda x, v: jnp.searchsorted(x, v, method="scan_unrolled"), "t; sorted", "s"),
    ("searchsorted[sort]", lambda x, v: jnp.searchsorted(x, v, method="sort"), "t; sorted", "s"),
    ("searchsorted[compare_all]", lambda x, v: jnp.searchsorted(x, v, method="compare_all"), "t; sorted", "s"),
    ("digitize[edges]", lambda x: jnp.digitize(x, jnp.array([-1.0, 0, 1])), "b, t"),
    ("digitize[symbolic edges]", jnp.digitize, "s", "t; sorted"),
    ("isin[s, t]", jnp.isin, "s; integer", "t; integer"),
    ("diag_indices_from[t, t]", lambda x: x[jnp.diag_indices_from(x)], "t, t"),
    ("diag_indices[t]", lambda x: x[jnp.diag_indices(x.shape[0])], "t, t"),
    ("tril_indices[t]", lambda x: x[jnp.tril_indices(x.shape[0])], "t, t"),
    ("triu_indices[t]", lambda x: x[jnp.triu_indices(x.shape[0], 1)], "t, t"),
    ("tril_indices_from[t, t]", lambda x: x[jnp.tril_indices_from(x)], "t, t"),
    ("triu_indices_from[t, t]", lambda x: x[jnp.triu_indices_from(x)], "t, t"),
    ("mask_indices[t]", lambda x: x[jnp.mask_indices(x.shape[0], jnp.triu, size=6)], "t, t"),
    ("tril[t, t]", jnp.tril, "t, t"),
    ("triu[k=1]", lambda x: jnp.triu(x, 1), "b, t"),
    ("tri[b, t]", lambda x: jnp.tri(x.shape[0], x.shape[1]) * x, "b, t"),
    ("fill_diagonal[t, t]", lambda x: jnp.fill_diagonal(x, 0.0, inplace=False), "t, t"),
    ("ravel_multi_index[b, t]", lambda x, i, j: jnp.ravel_multi_index((i, j), x.shape, mode="clip"), "b, t", "s; index:b", "s; index:t"),
    ("unravel_index[b, t]", lambda x: jnp.unravel_index(jnp.argmax(x), x.shape), "b, t"),
    ("packbits[t]", jnp.packbits, "t; boolean"),
    ("unpackbits[t]", jnp.unpackbits, "t; uint8; index:200"),
    ("indices[b, t]", lambda x: jnp.indices(x.shape)[1], "b, t"),
    ("fromfunction[b, t]", lambda x: jnp.fromfunction(lambda i, j: i * 2 + j, x.shape, dtype=jnp.int32), "b, t"),
]
_LAX = [
    ("slice[static]", lambda x: lax.slice(x, (1, 0), (2, x.shape[1])), "3, t"),
    ("slice[strides]", lambda x: lax.slice(x, (0,), x.shape, (2,)), "t"),
    ("slice_in_dim[t]", lambda x: lax.slice_in_dim(x, 1, None, axis=1), "b, t"),
    ("index_in_dim[-1]", lambda x: lax.index_in_dim(x, -1, axis=0, keepdims=False), "t, 3"),
    ("dynamic_slice[traced start]", lambda x, i: lax.dynamic_slice(x, (i,), (2,)), "t", "; index:t", "t >= 2"),
    ("dynamic_slice[symbolic length]", lambda x, y, i: lax.dynamic_slice(y, (i,), x.shape), "t", "t + s", "; index:s"),
    ("dynamic_slice[over the end]", lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 2)), "t, 2", "; index:2*t", "t >= 3"),
    ("dynamic_slice_in_dim[t]", lambda x, i: lax.dynamic_slice_in_dim(x, i, 1, axis=1), "b, t", "; index:t"),
    ("dynamic_index_in_dim[t]", lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), "t, 3", "; index:t"),
    ("dynamic_update_slice[traced start]", lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), "t, 3", "1, 3", "; index:t"),
    ("dynamic_update_slice[over the end]", lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)), "t", "3", "; index:2*t", "t >= 3"),
    ("dynamic_update_slice[symbolic block]", lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)), "t + s", "s", "; index:t"),
    ("dynamic_update_slice_in_dim[t]", lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 1), "b, t", "b, 1", "; index:t"),
    ("dynamic_update_index_in_dim[t]", lambda x, y, i: lax.dynamic_update_index_in_dim(x, y, i, 0), "t, 3", "3", "; index:t"),
    ("index_take[t]", lambda x, i: lax.index_take(x, jnp.stack([i]), (0,)), "t, 3", "s; index:t"),
    ("gather[rows]", lambda x, i: _gather(x, i), "t, 3", "s, 1; index:t"),
    ("scatter[rows]", lambda x, i, v: lax.scatter(x, i, v, _ROWS), "t, 3", "1, 1; index:t", "1, 3"),
    ("scatter_max[rows]", lambda x, i, v: lax.scatter_max(x, i, v, _ROWS), "t, 3", "s, 1; index:t", "s, 3"),
    ("scatter_min[rows]", lambda x, i, v: lax.scatter_min(x, i, v, _ROWS), "t, 3", "s, 1; index:t", "s, 3"),
    ("scatter_apply[rows]", lambda x, i: lax.scatter_apply(x, i, jnp.sin, _ROWS, update_shape=(1, 3)), "t, 3", "1, 1; index:t"),
]
# fmt: on
_ROWS = lax.ScatterDimensionNumbers(
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0,),
)
_ROW_SUMS = ("t, 3", "s, 1; index:t", "s, 3; positive")
# fmt: off
_SEGMENTS = [
    ("[num_segments=4]", lambda f, x, i: f(x, i, num_segments=4), "t", "t; index:4"),
    ("[num_segments=s]", lambda f, x, i, y: f(x, i, num_segments=y.shape[0]), "t, 3", "t; index:s", "s"),
]
# fmt: on


def _gather(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(x, i, numbers, slice_sizes=(1, 3))


def _scatter(name: str):
    return lambda x, i, v: getattr(lax, name)(x, i, v, _ROWS)


def _segments(*names: str):
    for name in names:
        f = getattr(jax.ops, name)
        for text, call, *rest in _SEGMENTS:
            bound = lambda *args, f=f, call=call: call(f, *args)  # noqa: E731
            yield (f"{name}{text}", bound, *rest)


PROGRAMS = (
    *table("slice ", _SLICES, exact=True),
    *table("", _AT, exact=True),
    *table("", _AT_SUMS),
    *table("jnp.", _JNP, exact=True),
    *table("lax.", _LAX, exact=True),
    *table(
        "lax.",
        [
            (f"{name}[rows]", _scatter(name), *_ROW_SUMS)
            for name in ("scatter_add", "scatter_sub", "scatter_mul")
        ],
    ),
    *table("ops.", _segments("segment_sum", "segment_prod")),
    *table("ops.", _segments("segment_max", "segment_min"), exact=True),
    *table("jnp.", [("interp[s in t]", jnp.interp, "s", "t; sorted", "t")]),
)
