"""Products that sum over an axis: dot, einsum, convolution, windows."""

import jax
import jax.numpy as jnp
import jax.scipy.signal
from jax import lax

from ._program import Program, program, table


# fmt: off
_EINSUMS = [
    ("bt,tc->bc", "b, t", "t, c"),
    ("bt,bt->", "b, t", "b, t"),
    ("bt,bt->b", "b, t", "b, t"),
    ("bt->t", "b, t"),
    ("bt->tb", "b, t"),
    ("tt->t", "t, t"),
    ("tt->", "t, t"),
    ("bthd,bshd->bhts", "b, t, 2, 4", "b, s, 2, 4"),
    ("bhts,bshd->bthd", "b, 2, t, s", "b, s, 2, 4"),
    ("btd,dhk->bthk", "b, t, 4", "4, 2, 3"),
    ("...t,ts->...s", "b, 3, t", "t, s"),
    ("i,j->ij", "b", "t"),
    ("ab,bc,cs->as", "a, b", "b, c", "c, s"),
    ("bt,bs,bc->tsc", "b, t", "b, s", "b, c"),
]
_JNP = [
    ("dot[t]", jnp.dot, "t", "t"),
    ("dot[b, t and t, c]", jnp.dot, "b, t", "t, c"),
    ("vdot[b, t]", jnp.vdot, "b, t", "b, t"),
    ("inner[b, t and s, t]", jnp.inner, "b, t", "s, t"),
    ("outer[b, t]", jnp.outer, "b", "t"),
    ("matmul[over t]", jnp.matmul, "b, t", "t, c"),
    ("matmul[batched]", jnp.matmul, "b, t, 4", "b, 4, s"),
    ("matmul[features only]", lambda x, w: x @ w, "b, t, 4", "4, 5"),
    ("matmul[gram]", lambda x: x @ x.T, "t, 3"),
    ("matmul[gram over t]", lambda x: x.T @ x, "t, 3"),
    ("matmul[bfloat16]", jnp.matmul, "b, t; bfloat16", "t, 4; bfloat16"),
    ("matmul[integers]", jnp.matmul, "b, t; integer", "t, 4; integer"),
    ("matvec[b, t]", jnp.matvec, "b, s, t", "b, t"),
    ("vecmat[b, t]", jnp.vecmat, "b, t", "b, t, s"),
    ("vecdot[axis=0]", lambda x, y: jnp.vecdot(x, y, axis=0), "t, 3", "t, 3"),
    ("tensordot[axes=1]", lambda x, y: jnp.tensordot(x, y, 1), "b, t", "t, s"),
    ("tensordot[axes=2]", jnp.tensordot, "b, t", "b, t"),
    ("tensordot[axes=0]", lambda x, y: jnp.tensordot(x, y, 0), "b", "t"),
    ("cross[b, t, 3]", jnp.cross, "b, t, 3", "b, t, 3"),
    ("kron[matrices]", jnp.kron, "a, b", "2, t"),
    ("convolve[full]", jnp.convolve, "t", "3"),
    ("convolve[same]", lambda x, k: jnp.convolve(x, k, mode="same"), "t", "3"),
    ("convolve[valid]", lambda x, k: jnp.convolve(x, k, mode="valid"), "t", "3", "t >= 3"),
    ("convolve[t and s]", jnp.convolve, "t", "s"),
    ("correlate[same]", lambda x, k: jnp.correlate(x, k, mode="same"), "t", "3"),
    ("correlate[t and s]", lambda x, k: jnp.correlate(x, k, mode="full"), "t", "s"),
]
# fmt: on
_NWC = ("NWC", "WIO", "NWC")
_NHWC = ("NHWC", "HWIO", "NHWC")


def _conv(*, padding, strides=(1,), numbers=_NWC, **options):
    def apply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, kernel, strides, padding, dimension_numbers=numbers, **options
        )

    return apply


_CONV = "conv_general_dilated"
# fmt: off
_CONVS = [
    (f"{_CONV}[1d same]", _conv(padding="SAME"), "b, t, 3", "3, 3, 4"),
    (f"{_CONV}[1d valid]", _conv(padding="VALID"), "b, t, 3", "3, 3, 4", "t >= 3"),
    (f"{_CONV}[1d causal]", _conv(padding=((2, 0),)), "b, t, 3", "3, 3, 4"),
    (f"{_CONV}[1d stride 2 same]", _conv(padding="SAME", strides=(2,)), "b, t, 3", "3, 3, 4"),
    (f"{_CONV}[1d stride 2 valid]", _conv(padding="VALID", strides=(2,)), "b, t, 3", "3, 3, 4", "t >= 3"),
    (f"{_CONV}[1d dilated kernel]", _conv(padding=((4, 0),), rhs_dilation=(2,)), "b, t, 3", "3, 3, 4"),
    (f"{_CONV}[1d dilated input]", _conv(padding=((1, 1),), lhs_dilation=(2,)), "b, t, 3", "3, 3, 4"),
    (f"{_CONV}[1d depthwise]", _conv(padding="SAME", feature_group_count=4), "b, t, 4", "3, 1, 4"),
    (f"{_CONV}[1d groups of examples]", _conv(padding="SAME", batch_group_count=2), "2*b, t, 3", "3, 3, 4"),
    (f"{_CONV}[1d symbolic channels]", _conv(padding="SAME"), "b, t, c", "3, c, 4"),
    (f"{_CONV}[1d symbolic filters]", _conv(padding="SAME"), "b, t, 3", "3, 3, c"),
    (f"{_CONV}[1d symbolic kernel]", _conv(padding="VALID"), "1, t, 1", "s, 1, 1", "t >= s"),
    (f"{_CONV}[2d same]", _conv(padding="SAME", strides=(1, 1), numbers=_NHWC), "b, s, t, 3", "3, 3, 3, 4"),
    (f"{_CONV}[2d stride 2]", _conv(padding="SAME", strides=(2, 2), numbers=_NHWC), "b, s, t, 3", "3, 3, 3, 4"),
    (f"{_CONV}[2d patches]", _conv(padding="VALID", strides=(2, 2), numbers=_NHWC), "b, 2*s, 2*t, 3", "2, 2, 3, 4"),
    (f"{_CONV}[2d batch only]", _conv(padding="SAME", strides=(1, 1), numbers=_NHWC), "b, 4, 4, 3", "3, 3, 3, 4"),
    (f"{_CONV}_patches[1d]", lambda x: lax.conv_general_dilated_patches(x, (3,), (1,), "SAME"), "b, 2, t"),
    (f"{_CONV}_local[1d]", lambda x, k: lax.conv_general_dilated_local(x, k, (1,), "SAME", (3,)), "b, 2, t", "4, 6, t"),
    ("conv[2d]", lambda x, k: lax.conv(x, k, (1, 1), "SAME"), "b, 3, s, t", "4, 3, 3, 3"),
    ("conv_with_general_padding[1d]", lambda x, k: lax.conv_with_general_padding(x, k, (1,), ((1, 1),), None, None), "b, 3, t", "4, 3, 3"),
    ("conv_transpose[1d stride 2]", lambda x, k: lax.conv_transpose(x, k, (2,), "SAME", dimension_numbers=_NWC), "b, t, 3", "3, 3, 4"),
    ("scaled_dot[b, 32]", lambda x, y: _scaled_dot(x, y), "b, 32", "32, c"),
    ("dot[t]", lax.dot, "t", "t"),
    ("dot[b, t, c]", lax.dot, "b, t", "t, c"),
    ("dot_general[two axes]", lambda x, y: lax.dot_general(x, y, (((1, 2), (1, 2)), ((0,), (0,)))), "b, t, 3", "b, t, 3"),
    ("dot_general[batch last]", lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((1,), (1,)))), "t, b", "t, b"),
    ("dot_general[int8]", lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32), "b, t; int8; integer", "t, 3; int8; integer"),
    ("batch_matmul[b, t, s]", lax.batch_matmul, "b, t, 4", "b, 4, s"),
    ("ragged_dot[groups]", lax.ragged_dot, "6, 4", "3, 4, c", "3; index:3"),
    ("ragged_dot[symbolic rows]", lambda x, w, n: lax.ragged_dot(x, w, n), "t, 4", "3, 4, 5", "3; index:2", "t >= 3"),
    ("ragged_dot_general[symbolic rows]", lambda x, w, n: _ragged(x, w, n), "t, 4", "3, 4, 5", "3; index:2", "t >= 3"),
]
_WINDOWS = [
    ("max same", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"), "b, t"),
    ("max pool 2", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), "b, t", "t >= 2"),
    ("min stride 2 same", lambda x: lax.reduce_window(x, jnp.inf, lax.min, (3,), (2,), "SAME"), "t"),
    ("max pool 2d", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"), "b, s, t, 3"),
    ("max dilated", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME", None, (2,)), "t", "t >= 3"),
]
_WINDOW_SUMS = [
    ("sum same", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"), "b, t"),
    ("average pool 2", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID") / 2, "b, t", "t >= 2"),
    ("moving average of true counts", lambda x: _moving_average(x), "t"),
    ("cumulative sum by a window", lambda x: lax.reduce_window(x, 0.0, lax.add, x.shape, (1,), ((x.shape[0] - 1, 0),)), "t"),
    ("sum over the whole axis", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, x.shape[1]), (1, 1), "VALID"), "b, t"),
    ("product", lambda x: lax.reduce_window(x, 1.0, lax.mul, (2,), (1,), "VALID"), "t; unit", "t >= 2"),
]
_SIGNAL = [
    ("convolve[t, 3]", lambda x, k: jax.scipy.signal.convolve(x, k, mode="same"), "t", "3"),
    ("convolve[fft]", lambda x, k: jax.scipy.signal.convolve(x, k, method="fft"), "t", "3"),
    ("convolve2d[s, t]", lambda x, k: jax.scipy.signal.convolve2d(x, k, mode="same"), "s, t", "3, 3", "s >= 3", "t >= 3"),
    ("correlate[t, 3]", lambda x, k: jax.scipy.signal.correlate(x, k, mode="full"), "t", "3"),
    ("correlate2d[s, t]", lambda x, k: jax.scipy.signal.correlate2d(x, k, mode="same"), "s, t", "3, 3", "s >= 3", "t >= 3"),
    ("fftconvolve[t, s]", jax.scipy.signal.fftconvolve, "t", "s"),
    ("detrend[linear]", jax.scipy.signal.detrend, "b, t", "t >= 2"),
    ("detrend[constant]", lambda x: jax.scipy.signal.detrend(x, type="constant"), "b, t"),
    ("stft[t]", lambda x: jax.scipy.signal.stft(x, nperseg=8)[2], "t", "t >= 8"),
    ("istft[frames]", lambda x: jax.scipy.signal.istft(x, nperseg=8)[1], "5, t; complex64", "t >= 2"),
    ("csd[t]", lambda x, y: jax.scipy.signal.csd(x, y, nperseg=8)[1], "t", "t", "t >= 8"),
    ("welch[t]", lambda x: jax.scipy.signal.welch(x, nperseg=8)[1], "b, t", "t >= 8"),
]
# fmt: on


def _ragged(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(x, w, sizes, numbers)


def _scaled_dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of two 8-bit matrices, one scale (here 1) for each 32 numbers."""
    x, y = x.astype(jnp.float8_e4m3fn), y.astype(jnp.float8_e4m3fn)
    left = jnp.ones((x.shape[0], 1), jnp.float8_e8m0fnu)
    right = jnp.ones((1, y.shape[1]), jnp.float8_e8m0fnu)
    return lax.scaled_dot(
        x, y, lhs_scale=left, rhs_scale=right, preferred_element_type=jnp.float32
    )


def _moving_average(x: jax.Array) -> jax.Array:
    def sums(v):
        return lax.reduce_window(v, 0.0, lax.add, (5,), (1,), "SAME")

    return sums(x) / sums(jnp.ones_like(x))


def _einsum(formula: str, *specs: str) -> Program:
    def apply(*arrays):
        return jnp.einsum(formula, *arrays)

    return program(f"jnp.einsum[{formula}]", apply, *specs)


def _distances(x: jax.Array, y: jax.Array) -> jax.Array:
    squares = (x**2).sum(-1)[:, None] + (y**2).sum(-1)[None, :]
    return squares - 2.0 * x @ y.T


def _nearest(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.argmin(_distances(x, y), axis=1)


def _power_iteration(a: jax.Array) -> jax.Array:
    def step(_, v):
        v = a @ v
        return v / jnp.linalg.norm(v)

    v = lax.fori_loop(0, 4, step, jnp.ones(a.shape[0]))
    return v @ (a @ v)


PROGRAMS = (
    *[_einsum(*row) for row in _EINSUMS],
    *table("jnp.", _JNP, exact=("outer", "kron", "matmul[integers]")),
    *table("lax.", _CONVS, exact=("dot_general[int8]",)),
    *table("lax.reduce_window: ", _WINDOWS, exact=True),
    *table("lax.reduce_window: ", _WINDOW_SUMS),
    *table("scipy.signal.", _SIGNAL),
    program("jnp.matmul[pairwise distances]", _distances, "b, 3", "t, 3"),
    program("jnp.argmin[nearest neighbour]", _nearest, "b, 3", "t, 3"),
    program("jnp.matmul[power iteration]", _power_iteration, "t, t; spd"),
)
