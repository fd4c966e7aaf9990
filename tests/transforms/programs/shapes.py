"""Making, joining, cutting and rearranging arrays whose sizes are symbolic."""

import jax
import jax.numpy as jnp
from jax import lax

from ._program import Program, program, table


# fmt: off
_RESHAPES = [
    ("reshape[(-1,)]", lambda x: x.reshape(-1), "b, t"),
    ("reshape[(-1, 4) merged batch]", lambda x: x.reshape(-1, 4), "b, t, 4"),
    ("reshape[(2, -1)]", lambda x: x.reshape(2, -1), "2*b"),
    ("reshape[(-1, 2)]", lambda x: x.reshape(-1, 2), "2*b, 3"),
    ("reshape[t to t/4, 4]", lambda x: x.reshape(-1, 4), "t", "t % 4 == 0"),
    ("reshape[split heads]", lambda x: x.reshape(*x.shape[:2], 2, 4), "b, t, 8"),
    ("reshape[merge heads]", lambda x: x.reshape(*x.shape[:2], -1), "b, t, 2, 4"),
    ("reshape[b*t back to b, t]", lambda x: (x.reshape(-1) * 2.0).reshape(x.shape), "b, t"),
    ("reshape[(t, b) of (b, t)]", lambda x: x.reshape(x.shape[1], x.shape[0]), "b, t"),
    ("reshape[order=F]", lambda x: x.reshape(-1, order="F"), "b, t"),
    ("ravel[b, t, 3]", jnp.ravel, "b, t, 3"),
    ("resize[(2, 3)]", lambda x: jnp.resize(x, (2, 3)), "t"),
    ("squeeze[axis=1]", lambda x: jnp.squeeze(x, 1), "b, 1, t"),
    ("expand_dims[axis=(0, 2)]", lambda x: jnp.expand_dims(x, (0, 2)), "t, 3"),
    ("atleast_1d[t]", jnp.atleast_1d, "t"),
    ("atleast_2d[t]", jnp.atleast_2d, "t"),
    ("atleast_3d[b, t]", jnp.atleast_3d, "b, t"),
    ("transpose[b, t]", jnp.transpose, "b, t"),
    ("transpose[(2, 0, 1)]", lambda x: jnp.transpose(x, (2, 0, 1)), "b, t, 3"),
    ("permute_dims[(1, 0)]", lambda x: jnp.permute_dims(x, (1, 0)), "b, t"),
    ("matrix_transpose[b, t, s]", jnp.matrix_transpose, "b, t, s"),
    ("swapaxes[1, 2]", lambda x: jnp.swapaxes(x, 1, 2), "b, t, s"),
    ("moveaxis[0, -1]", lambda x: jnp.moveaxis(x, 0, -1), "b, t, 3"),
    ("rollaxis[2]", lambda x: jnp.rollaxis(x, 2), "b, t, s"),
    ("flip[axis=1]", lambda x: jnp.flip(x, 1), "b, t"),
    ("flip[all]", jnp.flip, "b, t"),
    ("flipud[t, 3]", jnp.flipud, "t, 3"),
    ("fliplr[b, t]", jnp.fliplr, "b, t"),
    ("rot90[b, t]", jnp.rot90, "b, t"),
    ("roll[1]", lambda x: jnp.roll(x, 1), "t"),
    ("roll[-2, axis=1]", lambda x: jnp.roll(x, -2, axis=1), "b, t"),
    ("roll[traced shift]", lambda x, i: jnp.roll(x, i), "t", "; index:2*t"),
    ("roll[both axes]", lambda x: jnp.roll(x, (1, 2), axis=(0, 1)), "b, t"),
    ("roll[flat]", lambda x: jnp.roll(x, 3), "b, t"),
    ("diag[of a vector]", jnp.diag, "t"),
    ("diag[k=1 of a matrix]", lambda x: jnp.diag(x, k=1), "t, t", "t >= 2"),
    ("diagonal[b, t]", jnp.diagonal, "b, t"),
    ("diagonal[b, t, t]", lambda x: jnp.diagonal(x, axis1=1, axis2=2), "b, t, t"),
    ("diagflat[b, t]", jnp.diagflat, "b, t"),
    ("vander[t, 4]", lambda x: jnp.vander(x, 4), "t; unit"),
    ("vander[t]", jnp.vander, "t; unit"),
    ("broadcast_to[new axis]", lambda x, y: jnp.broadcast_to(x, y.shape), "t", "b, t"),
    ("broadcast_arrays[b, t]", jnp.broadcast_arrays, "b, 1", "1, t"),
    ("broadcast_shapes[b, t]", lambda x, y: jnp.ones(jnp.broadcast_shapes(x.shape, y.shape), x.dtype), "b, 1", "1, t"),
    ("tile[(2,)]", lambda x: jnp.tile(x, 2), "t"),
    ("tile[(s, 1)]", lambda x, y: jnp.tile(x, (y.shape[0], 1)), "b, t", "s"),
    ("repeat[2]", lambda x: jnp.repeat(x, 2), "t"),
    ("repeat[3, axis=1]", lambda x: jnp.repeat(x, 3, axis=1), "b, t"),
    ("repeat[traced counts]", lambda x, n: jnp.repeat(x, n, total_repeat_length=12), "t", "t; index:3"),
    ("repeat[traced counts, 2t in all]", lambda x, n: jnp.repeat(x, n, axis=0, total_repeat_length=2 * x.shape[0]), "t, 2", "t; index:4"),
    ("meshgrid[xy]", jnp.meshgrid, "b", "t"),
    ("meshgrid[ij]", lambda x, y: jnp.meshgrid(x, y, indexing="ij"), "b", "t"),
    ("kron[b, t]", jnp.kron, "b", "t"),
]
_JOINS = [
    ("concatenate[a and b]", lambda x, y: jnp.concatenate([x, y]), "a", "b"),
    ("concatenate[axis=1]", lambda x, y: jnp.concatenate([x, y], axis=1), "b, t", "b, s"),
    ("concatenate[with a constant]", lambda x: jnp.concatenate([x, jnp.zeros(3)]), "t"),
    ("concatenate[constant first]", lambda x: jnp.concatenate([jnp.ones((2, 3)), x]), "t, 3"),
    ("concatenate[three]", lambda x, y: jnp.concatenate([x, y, x], axis=0), "a, 2", "b, 2"),
    ("concatenate[features]", lambda x, y: jnp.concatenate([x, y], axis=-1), "b, t, 3", "b, t, 2"),
    ("concatenate[a cls token]", lambda x, c: jnp.concatenate([jnp.broadcast_to(c, (x.shape[0], 1, 3)), x], 1), "b, t, 3", "1, 1, 3"),
    ("concat[a and b]", lambda x, y: jnp.concat([x, y]), "a", "b"),
    ("append[a and b]", jnp.append, "a", "b"),
    ("stack[axis=0]", lambda x, y: jnp.stack([x, y]), "b, t", "b, t"),
    ("stack[axis=-1]", lambda x, y: jnp.stack([x, y], axis=-1), "t", "t"),
    ("stack & reshape[interleave]", lambda x, y: jnp.stack([x, y], -1).reshape(-1), "t", "t"),
    ("hstack[a and b]", lambda x, y: jnp.hstack([x, y]), "a", "b"),
    ("vstack[a and b]", lambda x, y: jnp.vstack([x, y]), "a, t", "b, t"),
    ("dstack[t]", lambda x, y: jnp.dstack([x, y]), "b, t", "b, t"),
    ("column_stack[t]", lambda x, y: jnp.column_stack([x, y]), "t", "t"),
    ("block[2 x 2]", lambda w, x, y, z: jnp.block([[w, x], [y, z]]), "a, b", "a, t", "s, b", "s, t"),
    ("r_[a and b]", lambda x, y: jnp.r_[x, y], "a", "b"),
    ("c_[t]", lambda x, y: jnp.c_[x, y], "t", "t"),
    ("split[2]", lambda x: jnp.split(x, 2), "2*b"),
    ("split[at 1]", lambda x: jnp.split(x, [1]), "t"),
    ("split[at b]", lambda x, y: jnp.split(y, [x.shape[0]]), "b", "b + t"),
    ("array_split[3]", lambda x: jnp.array_split(x, 3), "3*b, 2"),
    ("array_split[uneven]", lambda x: jnp.array_split(x, 2), "t"),
    ("hsplit[2]", lambda x: jnp.hsplit(x, 2), "b, 2*t"),
    ("vsplit[2]", lambda x: jnp.vsplit(x, 2), "2*b, t"),
    ("dsplit[2]", lambda x: jnp.dsplit(x, 2), "b, t, 2"),
    ("unstack[3 of (3, t)]", jnp.unstack, "3, t"),
    ("unstack[axis=1]", lambda x: jnp.unstack(x, axis=1), "t, 2"),
]
_FILLS = [
    ("arange[t]", lambda x: jnp.arange(x.shape[0]), "t"),
    ("arange[1, t, 2]", lambda x: jnp.arange(0, 2 * x.shape[0], 2), "t"),
    ("zeros[b, t]", lambda x: jnp.zeros((x.shape[1], x.shape[0])), "b, t"),
    ("ones[t]", lambda x: jnp.ones(x.shape), "t"),
    ("full[t + 1]", lambda x: jnp.full((x.shape[0] + 1,), 2.5), "t"),
    ("empty[t]", lambda x: jnp.empty(x.shape) * 0.0, "t"),
    ("zeros_like[b, t]", jnp.zeros_like, "b, t"),
    ("ones_like[b, t]", jnp.ones_like, "b, t"),
    ("full_like[t]", lambda x: jnp.full_like(x, 3.0), "t"),
    ("empty_like[t]", lambda x: jnp.empty_like(x) * 0.0, "t"),
    ("eye[t]", lambda x: jnp.eye(x.shape[0]), "t"),
    ("eye[b, t, k=1]", lambda x: jnp.eye(x.shape[0], x.shape[1], k=1), "b, t"),
    ("identity[t]", lambda x: jnp.identity(x.shape[0]), "t"),
    ("tri[t]", lambda x: jnp.tri(x.shape[0], dtype=bool), "t"),
    ("mgrid[t]", lambda x: jnp.mgrid[0 : x.shape[0], 0:3], "t"),
    ("ogrid[t]", lambda x: jnp.ogrid[0 : x.shape[0], 0:3], "t"),
]
_SPACES = [
    ("linspace[t points]", lambda x: jnp.linspace(0.0, 1.0, x.shape[0]), "t"),
    ("linspace[no endpoint]", lambda x: jnp.linspace(-1.0, 1.0, x.shape[0], endpoint=False), "t"),
    ("logspace[t points]", lambda x: jnp.logspace(0.0, 1.0, x.shape[0]), "t"),
    ("geomspace[t points]", lambda x: jnp.geomspace(1.0, 8.0, x.shape[0]), "t"),
    ("arange[over t]", lambda x: jnp.arange(x.shape[0]) / x.shape[0], "t"),
    ("hamming[t]", lambda x: x * jnp.hamming(x.shape[0]), "t"),
    ("hanning[t]", lambda x: x * jnp.hanning(x.shape[0]), "t"),
    ("blackman[t]", lambda x: x * jnp.blackman(x.shape[0]), "t"),
    ("bartlett[t]", lambda x: x * jnp.bartlett(x.shape[0]), "t"),
    ("kaiser[t]", lambda x: x * jnp.kaiser(x.shape[0], 2.0), "t"),
]
_LAX = [
    ("reshape[b, t]", lambda x: lax.reshape(x, (x.shape[0] * x.shape[1],)), "b, t"),
    ("collapse[0, 2]", lambda x: lax.collapse(x, 0, 2), "b, t, 3"),
    ("transpose[b, t]", lambda x: lax.transpose(x, (1, 0)), "b, t"),
    ("squeeze[0]", lambda x: lax.squeeze(x, (0,)), "1, t"),
    ("expand_dims[1]", lambda x: lax.expand_dims(x, (1,)), "t"),
    ("rev[axis 0]", lambda x: lax.rev(x, (0,)), "t, 3"),
    ("broadcast[b]", lambda x, y: lax.broadcast(x, y.shape), "t", "b"),
    ("broadcast_in_dim[t]", lambda x, y: lax.broadcast_in_dim(x, y.shape, (1,)), "t", "b, t, 3"),
    ("broadcast_like[t]", lambda x, y: lax.broadcast_like(x, y), "b, 1", "b, t"),
    ("broadcast_to_rank[t]", lambda x: lax.broadcast_to_rank(x, 3), "t"),
    ("broadcast_shapes[b, t]", lambda x, y: lax.full(lax.broadcast_shapes(x.shape, y.shape), 1.0), "b, 1", "1, t"),
    ("broadcasted_iota[b, t]", lambda x: lax.broadcasted_iota(jnp.int32, x.shape, 1), "b, t"),
    ("iota[t]", lambda x: lax.iota(jnp.int32, x.shape[0]), "t"),
    ("full[t]", lambda x: lax.full(x.shape, 2.0), "t"),
    ("full_like[t]", lambda x: lax.full_like(x, 2.0), "t"),
    ("empty[t]", lambda x: lax.empty(x.shape, x.dtype) * 0.0, "t"),
    ("concatenate[a and b]", lambda x, y: lax.concatenate([x, y], 0), "a", "b"),
    ("stack[t]", lambda x, y: lax.stack([x, y], 1), "t", "t"),
    ("unstack[(2, t)]", lambda x: lax.unstack(x), "2, t"),
    ("split[two parts]", lambda x, y: lax.split(y, (x.shape[0], 3), axis=0), "b", "b + 3"),
    ("tile[(2, 1)]", lambda x: lax.tile(x, (2, 1)), "b, t"),
    ("pad[low and high]", lambda x: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0))), "t, 3"),
    ("pad[interior]", lambda x: lax.pad(x, 5.0, ((0, 0, 1),)), "t"),
    ("pad[negative]", lambda x: lax.pad(x, 0.0, ((-1, 1, 0),)), "t"),
    ("pad[to twice the size]", lambda x: lax.pad(x, 0.0, ((0, x.shape[0], 0),)), "t"),
]
# fmt: on
_PADS = {
    "constant": {},
    "edge": {},
    "reflect": {},
    "symmetric": {},
    "wrap": {},
    "linear_ramp": {},
    "maximum": {},
    "minimum": {},
    "mean": {},
    "median": {},
    "empty": {},
}  # fmt: skip


def _pads() -> list[Program]:
    """jnp.pad in each mode over a symbolic axis beside a batch axis."""
    return [
        program(
            f"jnp.pad[{mode}]",
            lambda x, mode=mode: jnp.pad(x, ((0, 0), (2, 1)), mode=mode),
            "b, t",
            where="t >= 3",
            exact=mode not in ("linear_ramp", "mean", "median"),
        )
        for mode in _PADS
    ]


def _causal(x: jax.Array) -> jax.Array:
    rows = lax.broadcasted_iota(jnp.int32, (x.shape[0], x.shape[0]), 0)
    columns = lax.broadcasted_iota(jnp.int32, (x.shape[0], x.shape[0]), 1)
    return rows >= columns


PROGRAMS = (
    *table("jnp.", _RESHAPES, exact=True),
    *table("jnp.", _JOINS, exact=True),
    *table("jnp.", _FILLS, exact=True),
    *table("jnp.", _SPACES),
    *table("lax.", _LAX, exact=True),
    *_pads(),
    program(
        "jnp.pad[symbolic width]",
        lambda x, y: jnp.pad(x, (0, y.shape[0])),
        "t",
        "s",
        exact=True,
    ),
    program("lax.broadcasted_iota[causal mask]", _causal, "t", exact=True),
    program(
        "jnp.vectorize[rows]",
        jnp.vectorize(jnp.flip, signature="(n)->(n)"),
        "b, t",
        exact=True,
    ),
)
