"""JAX's own transformations around symbolic sizes: vmap, jit, custom rules, axis names."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax, nn

from ._program import Program, program, table


@jax.custom_jvp
def _soft_absolute(x: jax.Array) -> jax.Array:
    return jnp.sqrt(x * x + 1e-2)


@_soft_absolute.defjvp
def _soft_absolute_jvp(primals, tangents):
    (x,), (v,) = primals, tangents
    return _soft_absolute(x), jnp.sign(x) * v


@jax.custom_jvp
def _centred(x: jax.Array) -> jax.Array:
    return x - x.mean()


@_centred.defjvp
def _centred_jvp(primals, tangents):
    (x,), (v,) = primals, tangents
    return _centred(x), v - v.mean()


@jax.custom_vjp
def _clipped_gradient(x: jax.Array) -> jax.Array:
    return x


def _clipped_forward(x: jax.Array):
    return x, None


def _clipped_backward(_, g: jax.Array):
    return (g / jnp.maximum(1.0, jnp.linalg.norm(g)),)


_clipped_gradient.defvjp(_clipped_forward, _clipped_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x * scale


_scaled.defvjp(lambda x, scale: (x * scale, x.sum()), lambda scale, s, g: (g * s,))


@jax.custom_gradient
def _log1pexp(x: jax.Array):
    e = jnp.exp(x)
    return jnp.log1p(e), lambda g: g * (1 - 1 / (1 + e))


@jax.custom_batching.custom_vmap
def _rank(x: jax.Array) -> jax.Array:
    return jnp.argsort(jnp.argsort(x))


@_rank.def_vmap
def _rank_rows(axis_size, batched, x):
    return jnp.argsort(jnp.argsort(x, axis=1), axis=1), True


@jax.jit
def _inner_softmax(x: jax.Array) -> jax.Array:
    return jnp.exp(x - x.max()) / jnp.exp(x - x.max()).sum()


@functools.partial(jax.jit, static_argnames="axis")
def _inner_cumsum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis)


@functools.partial(jax.jit, inline=True)
def _inlined(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) - jnp.tanh(x).mean()


def _named(f: Callable, in_axes: int = 0, out_axes: int | None = 0) -> Callable:
    return jax.vmap(f, in_axes, out_axes, axis_name="i")


def _pairs(f: Callable) -> Callable:
    return jax.vmap(jax.vmap(f, (None, 0)), (0, None))


# fmt: off
_VMAPS = [
    ("vmap: jnp.sum of rows", jax.vmap(jnp.sum), "b, t"),
    ("vmap: in_axes=1", jax.vmap(jnp.mean, in_axes=1), "b, t"),
    ("vmap: out_axes=1", jax.vmap(lambda x: x - x.mean(), out_axes=1), "b, t"),
    ("vmap: in_axes=(0, None)", jax.vmap(jnp.dot, (0, None)), "b, t", "t"),
    ("vmap: pairwise distances", _pairs(lambda x, y: jnp.linalg.norm(x - y)), "b, 3", "t, 3"),
    ("vmap: pairwise kernel and solve", lambda x, y: jnp.linalg.solve(_pairs(lambda u, v: jnp.exp(-((u - v) ** 2)))(x, x) + jnp.eye(x.shape[0]), y), "t", "t"),
    ("vmap: of nn.softmax over each row", jax.vmap(nn.softmax), "b, t"),
    ("vmap: of jnp.linalg.solve", jax.vmap(jnp.linalg.solve), "b, 3, 3; well_conditioned", "b, 3"),
    ("vmap: of lax.while_loop", jax.vmap(lambda x: lax.while_loop(lambda v: v > 0.1, lambda v: v * 0.5, x)), "t"),
    ("vmap: of lax.cond", jax.vmap(lambda p, x: lax.cond(p, jnp.sum, jnp.mean, x)), "b; boolean", "b, t"),
    ("vmap: of lax.dynamic_slice", jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (1,))), "b, t", "b; index:t"),
    ("vmap: of jnp.convolve", jax.vmap(lambda x, k: jnp.convolve(x, k, mode="same"), (0, None)), "b, 8", "3"),
    ("vmap: three deep", jax.vmap(jax.vmap(jax.vmap(lambda x: x.sum()))), "a, b, s, t"),
    ("vmap: axis_size=t", lambda x: jax.vmap(lambda: jnp.ones(3), axis_size=x.shape[0])(), "t"),
    ("vmap: lax.psum", _named(lambda v: lax.psum(v, "i")), "t, 3"),
    ("vmap: lax.pmean centre", _named(lambda v: v - lax.pmean(v, "i")), "t, 3"),
    ("vmap: lax.pmean of symbolic rows", _named(lambda v: v * lax.pmean(v.sum(), "i")), "b, t"),
    ("vmap: lax.all_gather", _named(lambda v: lax.all_gather(v, "i")[::-1].sum(0)), "b, t"),
    ("vmap: lax.all_gather tiled", _named(lambda v: lax.all_gather(v, "i", tiled=True), out_axes=None), "b, t"),
    ("vmap: jnp.vectorize with a signature", jnp.vectorize(jnp.dot, signature="(n),(n)->()"), "b, t", "b, t"),
    ("jit: nested softmax of rows", jax.vmap(_inner_softmax), "b, t"),
    ("jit: nested twice", jax.jit(lambda x: _inner_softmax(_inner_softmax(x))), "t"),
    ("jit: one function at two sizes", lambda x, y: (_inner_softmax(x), _inner_softmax(y)), "b", "t"),
    ("jit: static axis", lambda x: _inner_cumsum(x, axis=1), "b, t"),
    ("jit: inlined", _inlined, "t"),
    ("jit: constant closed over", jax.jit(lambda x: x * jnp.arange(4.0)[None, :]), "t, 4"),
    ("jit: a pytree of arrays", lambda x, y: jax.jit(lambda d: {"s": d["x"].sum(0), "p": d["x"] @ d["y"]})({"x": x, "y": y}), "b, t", "t"),
    ("checkpoint: layer norm", jax.checkpoint(lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)), "b, t"),
    ("checkpoint: of vmap", jax.checkpoint(jax.vmap(_inner_softmax)), "b, t"),
    ("custom_jvp: mean over t", _centred, "t"),
    ("custom_jvp: its tangent", lambda x, v: jax.jvp(_centred, (x,), (v,)), "t", "t"),
    ("custom_jvp: its gradient", jax.grad(lambda x: (_centred(x) ** 2).sum()), "t"),
    ("custom_jvp: vmap", jax.vmap(_centred), "b, t"),
    ("custom_jvp: elementwise gradient", jax.grad(lambda x: _soft_absolute(x).sum()), "b, t"),
    ("custom_vjp: clipped gradient", jax.grad(lambda x: (_clipped_gradient(x) ** 2).sum()), "b, t"),
    ("custom_vjp: residual is a sum", jax.grad(lambda x: _scaled(x, 2.0).sum()), "t"),
    ("custom_vjp: vmap of the gradient", jax.vmap(jax.grad(lambda x: (_clipped_gradient(x) ** 2).sum())), "b, t"),
    ("custom_gradient: log(1 + exp)", jax.grad(lambda x: _log1pexp(x).sum()), "t"),
    ("closure_convert: scale by a sum", lambda x: _converted(x), "t"),
    ("named_scope & named_call: mean", lambda x: jax.named_call(jnp.mean, name="mean")(x), "t"),
    ("pytree: dictionary of two sizes", lambda x, y: {"a": x.sum(0), "b": (y * 2.0, y.mean())}, "b, 3", "t"),
    ("lax.dce_sink[t]", lambda x: (lax.dce_sink(x), x.mean())[1], "t"),
    ("outputs: the same array twice", lambda x: (x, x, x.sum()), "t"),
    ("outputs: a constant and an input", lambda x: (jnp.float32(3.0), x), "t"),
    ("outputs: unused argument", lambda x, y: y.sum(), "b", "t"),
    ("outputs: sizes as numbers", lambda x: (jnp.float32(x.shape[0]), jnp.int32(x.shape[1])), "b, t"),
    ("lax.psum[number of members]", _named(lambda v: v / lax.psum(1, "i")), "t"),
    ("lax.psum_scatter[t]", _named(lambda v: lax.psum_scatter(v, "i")), "t, t"),
    ("lax.psum_scatter[tiled]", _named(lambda v: lax.psum_scatter(v, "i", tiled=True)), "t, 2*t"),
]
_EXACT = [
    ("vmap: jnp.sort", jax.vmap(jnp.sort), "b, t"),
    ("vmap: jnp.argmax", jax.vmap(jnp.argmax, in_axes=1), "b, t"),
    ("vmap: gather", jax.vmap(lambda x, i: x[i]), "b, t", "b, s; index:t"),
    ("vmap: scatter", jax.vmap(lambda x, i: x.at[i].set(0.0)), "b, t", "b, s; index:t"),
    ("vmap: jnp.searchsorted", jax.vmap(jnp.searchsorted), "b, t; sorted", "b, s"),
    ("vmap: lax.pmax", _named(lambda v: lax.pmax(v, "i")), "t, 3"),
    ("vmap: lax.pmin of symbolic rows", _named(lambda v: lax.pmin(v, "i")), "b, t"),
    ("vmap: lax.axis_index", _named(lambda v: v * lax.axis_index("i").astype(jnp.float32)), "t, 3"),
    ("vmap: lax.axis_size", _named(lambda v: v + jnp.float32(lax.axis_size("i"))), "t"),
    ("vmap: lax.all_to_all", _named(lambda v: lax.all_to_all(v, "i", 0, 0)), "t, t"),
    ("vmap: lax.pswapaxes", _named(lambda v: lax.pswapaxes(v, "i", 0)), "t, t, 2"),
    ("vmap: lax.ppermute of 4", _named(lambda v: lax.ppermute(v, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])), "4, t"),
    ("vmap: lax.pshuffle of 3", _named(lambda v: lax.pshuffle(v, "i", [2, 0, 1])), "3, t"),
    ("custom_jvp: elementwise", _soft_absolute, "b, t"),
    ("custom_vjp: identity", _clipped_gradient, "b, t"),
    ("custom_vmap: ranks", jax.vmap(_rank), "b, t"),
    ("jit: x[::-1] twice", lambda x: jax.jit(lambda v: v[::-1])(jax.jit(lambda v: v[::-1])(x)), "t"),
]
# fmt: on


def _converted(x: jax.Array) -> jax.Array:
    total = x.sum()
    f, constants = jax.closure_convert(lambda v: v * total, x)
    return f(x, *constants)


PROGRAMS: tuple[Program, ...] = (
    *table("", _VMAPS),
    *table("", _EXACT, exact=True),
    program("pure: identity", lambda x: x, "b, t", exact=True),
)
