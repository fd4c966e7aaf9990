"""Derivatives of the other families: reverse, forward, second order, per example."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax, nn

from ._layers import (
    attention,
    batch_norm,
    block,
    causal,
    contrastive,
    conv_block,
    cross_entropy,
    ctc,
    experts,
    graph,
    language_model,
    layer_norm,
    lstm,
    masked_cross_entropy,
)
from ._program import Program, program, table
from .control_flow import _ema, _fixed_point, _forward_algorithm, _halve_mean, _rnn


def _weighted(y: jax.Array) -> jax.Array:
    """Σ y² / 2 + Σ y: a scalar whose gradient reads every element."""
    leaves = [v for v in jax.tree.leaves(y) if jnp.issubdtype(v.dtype, jnp.floating)]
    return sum((jnp.sum(0.5 * v * v + v) for v in leaves), jnp.float32(0.0))


def _grad(f: Callable, argnums=0) -> Callable:
    return jax.grad(lambda *arrays: _weighted(f(*arrays)), argnums)


# fmt: off
# Each row: name, f, arguments. The program is the gradient in the first argument.
_FIRST = [
    ("jnp.sum[axis=0]", lambda x: x.sum(0), "t, 3"),
    ("jnp.mean[all]", jnp.mean, "b, t"),
    ("jnp.var[axis=-1]", lambda x: x.var(-1), "b, t"),
    ("jnp.prod[axis=-1]", lambda x: x.prod(-1), "b, t; positive"),
    ("jnp.max[axis=-1]", lambda x: x.max(-1), "b, t"),
    ("jnp.max[ties]", lambda x: jnp.round(x).max(), "t"),
    ("jnp.min[axis=0]", lambda x: x.min(0), "t, 3"),
    ("jnp.median[t]", jnp.median, "t"),
    ("jnp.cumsum[t]", jnp.cumsum, "t"),
    ("jnp.cumprod[t]", jnp.cumprod, "t; positive"),
    ("lax.cummax[t]", lambda x: lax.cummax(x), "t"),
    ("lax.cumlogsumexp[t]", lambda x: lax.cumlogsumexp(x), "t"),
    ("nn.logsumexp[axis=1]", lambda x: nn.logsumexp(x, axis=1), "b, t"),
    ("nn.softmax[axis=1]", nn.softmax, "b, t"),
    ("nn.log_softmax[axis=0]", lambda x: nn.log_softmax(x, axis=0), "t, 3"),
    ("nn.gelu[b, t]", nn.gelu, "b, t"),
    ("nn.relu[b, t]", nn.relu, "b, t"),
    ("jnp.sort[t]", lambda x: jnp.sort(x) * jnp.arange(x.shape[0], dtype=jnp.float32), "t"),
    ("lax.top_k[values]", lambda x: lax.top_k(x, 2)[0], "b, t", "t >= 2"),
    ("jnp.take[rows]", lambda x, i: x[i], "t, 3", "s; index:t"),
    ("jnp.take_along_axis[axis=1]", lambda x, i: jnp.take_along_axis(x, i, 1), "b, t", "b, s; index:t"),
    ("at[i].set", lambda x, i: x.at[i].set(0.0), "t", "s; index:t"),
    ("at[i].add values", lambda v, x, i: x.at[i].add(v), "s", "t", "s; index:t"),
    ("ops.segment_sum[4]", lambda x, i: jax.ops.segment_sum(x, i, 4), "t, 3", "t; index:4"),
    ("ops.segment_max[s]", lambda x, i, y: jnp.where(jnp.isfinite(jax.ops.segment_max(x, i, y.shape[0])), jax.ops.segment_max(x, i, y.shape[0]), 0.0), "t", "t; index:s", "s"),
    ("lax.dynamic_slice[t]", lambda x, i: lax.dynamic_slice(x, (i,), (2,)), "t", "; index:t", "t >= 2"),
    ("lax.dynamic_update_slice[t]", lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)), "t", "1", "; index:t"),
    ("jnp.concatenate[a and b]", lambda x, y: jnp.concatenate([x, y]) ** 2, "a", "b"),
    ("jnp.reshape[merged]", lambda x: jnp.sin(x.reshape(-1)), "b, t"),
    ("jnp.pad[edge]", lambda x: jnp.pad(x, 2, mode="edge"), "t"),
    ("jnp.roll[1]", lambda x: x * jnp.roll(x, 1), "t"),
    ("jnp.repeat[2]", lambda x: jnp.repeat(x, 2), "t"),
    ("jnp.where[mask]", jnp.where, "b, t; boolean", "b, t", "b, t"),
    ("x[1:] - x[:-1]", lambda x: x[1:] - x[:-1], "t"),
    ("x[::2]", lambda x: x[::2], "t"),
    ("jnp.broadcast_to[b]", lambda x, y: jnp.broadcast_to(x, y.shape) * y, "t", "b, t"),
    ("jnp.matmul[left]", jnp.matmul, "b, t", "t, c"),
    ("jnp.einsum[bt,bs->ts]", lambda x, y: jnp.einsum("bt,bs->ts", x, y), "b, t", "b, s"),
    ("jnp.linalg.norm[rows]", lambda x: jnp.linalg.norm(x, axis=-1), "b, t"),
    ("jnp.linalg.solve[t, t]", jnp.linalg.solve, "t, t; well_conditioned", "t"),
    ("jnp.linalg.cholesky[t, t]", jnp.linalg.cholesky, "t, t; spd"),
    ("jnp.linalg.slogdet[t, t]", lambda x: jnp.linalg.slogdet(x)[1], "t, t; spd"),
    ("jnp.linalg.svd[values]", lambda x: jnp.linalg.svd(x, compute_uv=False).sum(), "t, 2"),
    ("jnp.fft.rfft[power]", lambda x: jnp.abs(jnp.fft.rfft(x)) ** 2, "b, t"),
    ("jnp.interp[values]", lambda v, x, i: jnp.interp(i, x, v), "t", "t; sorted", "s"),
    ("lax.conv_general_dilated[input]", lambda x, k: _conv(x, k), "b, t, 3", "3, 3, 4"),
    ("lax.conv_general_dilated[kernel]", lambda k, x: _conv(x, k), "3, 3, 4", "b, t, 3"),
    ("lax.conv_general_dilated[stride 2]", lambda x, k: _conv(x, k, 2), "b, t, 3", "3, 3, 4"),
    ("lax.reduce_window[max pool]", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME"), "b, t"),
    ("lax.reduce_window[average pool]", lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (2,), "SAME"), "t"),
    ("lax.scan[RNN weights]", lambda w, x: _rnn(w, x), "3, 3", "t, b, 3"),
    ("lax.scan[moving average]", _ema, "t, 3"),
    ("lax.scan[forward algorithm]", _forward_algorithm, "t, 4", "4, 4"),
    ("lax.scan[LSTM weights]", lstm, "5, 12", "t, b, 2"),
    ("lax.scan[CTC]", lambda x, i: ctc(nn.log_softmax(x), i), "t, 5", "s; index:5"),
    ("lax.fori_loop[fixed count]", lambda x: lax.fori_loop(0, 3, lambda _, v: jnp.tanh(v - v.mean()), x), "b, t"),
    ("lax.cond[mean decides]", lambda x: lax.cond(x.mean() > 0, jnp.square, jnp.tanh, x), "t"),
    ("lax.associative_scan[add]", lambda x: lax.associative_scan(jnp.multiply, x), "t; positive"),
    ("layer norm", layer_norm, "b, t, c"),
    ("batch norm", batch_norm, "b, t, 4"),
    ("dense weights", lambda w, x: nn.relu(x @ w), "4, c", "b, t, 4"),
    ("embedding table", lambda w, i: w[i], "c, 4", "b, t; index:c"),
    ("cross-entropy", cross_entropy, "b, c", "b; index:c"),
    ("masked cross-entropy", masked_cross_entropy, "b, t, 5", "b, t; index:5", "b, t; boolean"),
    ("contrastive loss", contrastive, "b, 4", "b, 4"),
    ("attention", attention, "b, t, 2, 4", "b, s, 2, 4", "b, s, 2, 4"),
    ("causal attention", causal, "b, t, 2, 4", "b, t, 2, 4", "b, t, 2, 4"),
    ("nn.dot_product_attention[causal]", lambda q: nn.dot_product_attention(q, q, q, is_causal=True), "b, t, 2, 4"),
    ("transformer block", block, "b, t, 8", "3, 8, 8", "8, 8", "8, 16"),
    ("conv block", conv_block, "b, t, 4", "3, 4, 4"),
    ("top-2 experts", experts, "t, 3", "3, 4", "4, 3, 3"),
    ("graph convolution", graph, "t, 3", "s; index:t", "s; index:t"),
]
_OTHERS = [
    ("grad: language model, all weights", lambda i, *w: jax.grad(lambda w: language_model(i, *w))(w), "b, t; index:11", "11, 8", "3, 8, 8", "8, 8", "8, 16", "t >= 2"),
    ("grad: value_and_grad of a regression", lambda w, x, y: jax.value_and_grad(_squared_error)(w, x, y), "4", "b, 4", "b"),
    ("grad: one descent step", lambda w, x, y: w - 0.1 * jax.grad(_squared_error)(w, x, y), "c", "b, c", "b"),
    ("grad: momentum over 3 steps", lambda w, x, y: _descend(w, x, y), "4", "b, 4", "b"),
    ("grad: clipped by the global norm", lambda w, x, y: _clip(jax.grad(_squared_error)(w, x, y)), "c", "b, c", "b"),
    ("grad: of the gradient's norm", lambda w, x, y: jax.grad(lambda v: (jax.grad(_squared_error)(v, x, y) ** 2).sum())(w), "4", "b, 4", "b"),
    ("grad: accumulated over microbatches", lambda w, x, y: _accumulate(w, x, y), "4", "2*b, 4", "2*b"),
    ("vjp: jnp.tanh of a matmul", lambda x, w, g: jax.vjp(lambda u, v: jnp.tanh(u @ v), x, w)[1](g), "b, t", "t, c", "b, c"),
    ("vjp: nn.softmax", lambda x, g: jax.vjp(nn.softmax, x)[1](g), "b, t", "b, t"),
    ("vjp: jnp.sort", lambda x, g: jax.vjp(jnp.sort, x)[1](g), "b, t", "b, t"),
    ("vjp: jnp.cumsum", lambda x, g: jax.vjp(jnp.cumsum, x)[1](g), "t", "t"),
    ("jvp: nn.logsumexp", lambda x, v: jax.jvp(nn.logsumexp, (x,), (v,)), "t", "t"),
    ("jvp: layer norm", lambda x, v: jax.jvp(layer_norm, (x,), (v,)), "b, t", "b, t"),
    ("jvp: jnp.max", lambda x, v: jax.jvp(lambda u: u.max(-1), (x,), (v,)), "b, t", "b, t"),
    ("jvp: lax.scan", lambda x, v: jax.jvp(_ema, (x,), (v,)), "t, 3", "t, 3"),
    ("jvp: lax.while_loop", lambda x, v: jax.jvp(_halve_mean, (x,), (v,)), "t", "t"),
    ("jvp: fixed point", lambda a, y, v: jax.jvp(lambda u: _fixed_point(a, u), (y,), (v,)), "t, t", "t", "t"),
    ("linearize: jnp.sin of a mean", lambda x, v: jax.linearize(lambda u: jnp.sin(u - u.mean()), x)[1](v), "t", "t"),
    ("linear_transpose: jnp.cumsum", lambda x: jax.linear_transpose(jnp.cumsum, x)(x), "t"),
    ("hessian: log-sum-exp over 3", lambda x: jax.vmap(jax.hessian(nn.logsumexp))(x), "b, 3"),
    ("hessian: log-sum-exp over t", jax.hessian(nn.logsumexp), "t"),
    ("jacfwd: nn.softmax over t", jax.jacfwd(nn.softmax), "t"),
    ("jacrev: jnp.cumsum over t", jax.jacrev(jnp.cumsum), "t"),
    ("hessian-vector product", lambda x, v: jax.jvp(jax.grad(lambda u: nn.logsumexp(u) ** 2), (x,), (v,)), "t", "t"),
    ("vmap(grad): each example", lambda w, x, y: jax.vmap(jax.grad(_squared_error), (None, 0, 0))(w, x[:, None], y[:, None]), "4", "b, 4", "b"),
    ("vmap(grad): rows of log-sum-exp", jax.vmap(jax.grad(nn.logsumexp)), "b, t"),
    ("grad(vmap): sum of row norms", jax.grad(lambda x: jax.vmap(jnp.linalg.norm)(x).sum()), "b, t"),
    ("remat: attention", _grad(jax.checkpoint(causal)), "b, t, 2, 4", "b, t, 2, 4", "b, t, 2, 4"),
    ("remat: perceptron, dots saved", _grad(jax.checkpoint(lambda x, u, v: nn.relu(x @ u) @ v, policy=jax.checkpoint_policies.dots_saveable)), "b, c", "c, 4", "4, 3"),
    ("remat: inside lax.scan", _grad(lambda x: lax.scan(jax.checkpoint(lambda c, v: (jnp.sin(c + v),) * 2), jnp.zeros(3), x)), "t, 3"),
    ("grad: stop_gradient in a straight-through round", jax.grad(lambda x: ((x + lax.stop_gradient(jnp.round(x) - x)) ** 2).sum()), "b, t"),
    ("grad: twice through jnp.tanh and a mean", jax.grad(lambda x: jax.grad(lambda u: jnp.tanh(u - u.mean()).sum())(x).sum()), "t"),
]
# fmt: on


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x, kernel, (stride,), "SAME", dimension_numbers=numbers
    )


def _squared_error(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((x @ w - y) ** 2).mean()


def _descend(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    def step(state, _):
        w, m = state
        m = 0.9 * m + jax.grad(_squared_error)(w, x, y)
        return (w - 0.05 * m, m), _squared_error(w, x, y)

    return lax.scan(step, (w, jnp.zeros_like(w)), length=3)[1]


def _clip(g: jax.Array) -> jax.Array:
    return g / jnp.maximum(1.0, jnp.linalg.norm(g))


def _accumulate(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    parts = x.reshape(2, -1, x.shape[1]), y.reshape(2, -1)

    def step(total, xy):
        return total + jax.grad(_squared_error)(w, *xy) / 2, None

    return lax.scan(step, jnp.zeros_like(w), parts)[0]


def _first_order() -> list[Program]:
    """The rows' gradients; where the first argument is a mask, in the second."""
    return [
        p
        for name, f, *specs in _FIRST
        for p in table("grad: ", [(name, _grad(f, int("boolean" in specs[0])), *specs)])
    ]


PROGRAMS: tuple[Program, ...] = (
    *_first_order(),
    *table("", _OTHERS),
    program("grad: jnp.abs of jnp.diff", _grad(lambda x: jnp.abs(jnp.diff(x))), "t"),
)
