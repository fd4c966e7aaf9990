"""Neural networks: jax.nn by name, then the layers, losses and blocks that users write."""

import functools

import jax
import jax.numpy as jnp
from jax import nn

from ._layers import (
    alibi,
    attention,
    balance_loss,
    batch_norm,
    block,
    causal,
    contrastive,
    conv_block,
    cross_entropy,
    ctc,
    decode_step,
    deep_sets,
    edge_softmax,
    expert_choice,
    experts,
    experts_with_capacity,
    graph,
    group_norm,
    gru,
    image_net,
    language_model,
    layer_norm,
    linear_attention,
    lstm,
    masked_cross_entropy,
    masked_rnn,
    patches,
    rms_norm,
    rotary,
    sinusoids,
    unet,
    windowed,
    with_lengths,
)
from ._program import Program, named, program, table


_EXACT_ACTIVATIONS = "hard_tanh identity relu relu6 tanh"
_ACTIVATIONS = (
    "celu elu gelu hard_sigmoid hard_silu hard_swish leaky_relu "
    "log_sigmoid mish selu sigmoid silu soft_sign softplus sparse_plus "
    "sparse_sigmoid squareplus swish "
)
_OVER_AN_AXIS = "softmax log_softmax logsumexp standardize logmeanexp"


def _over_axes() -> list[Program]:
    return [
        program(
            f"nn.{name}[axis={axis}]",
            lambda x, name=name, axis=axis: getattr(nn, name)(x, axis=axis),
            "b, t",
        )
        for name in _OVER_AN_AXIS.split()
        if hasattr(nn, name)
        for axis in (0, -1, (0, 1))
    ]


def _scaled_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Blocks of 32 numbers of 8 bits, each with a scale (here 1)."""
    x, w = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
    scales = [jnp.ones((*v.shape[:2], 1), jnp.float8_e8m0fnu) for v in (x, w)]
    return nn.scaled_matmul(x, w, *scales)


_QKV = ("b, t, 2, 4", "b, t, 2, 4", "b, t, 2, 4")
_CROSS = ("b, t, 2, 4", "b, s, 2, 4", "b, s, 2, 4")
_dpa = nn.dot_product_attention
_WEIGHTS = ("3, 8, 8", "8, 8", "8, 16")

# fmt: off
_NN = [
    ("glu[t]", nn.glu, "b, 2*t"),
    ("glu[axis=0]", lambda x: nn.glu(x, axis=0), "2*t, 3"),
    ("log1mexp[t]", nn.log1mexp, "t; positive"),
    ("gelu[approximate=False]", lambda x: nn.gelu(x, approximate=False), "b, t"),
    ("one_hot[4 classes]", lambda i: nn.one_hot(i, 4), "b, t; index:4"),
    ("one_hot[c classes]", lambda i, x: nn.one_hot(i, x.shape[0]), "t; index:c", "c"),
    ("one_hot[axis=0]", lambda i, x: nn.one_hot(i, x.shape[0], axis=0), "t; index:c", "c"),
    ("softmax[where]", lambda x, m: nn.softmax(x, where=m.at[:, 0].set(True)), "b, t", "b, t; boolean"),
    ("softmax[mask by -inf]", lambda x, m: nn.softmax(jnp.where(m.at[:, 0].set(True), x, -jnp.inf)), "b, t", "b, t; boolean"),
    ("softmax[bfloat16]", nn.softmax, "b, t; bfloat16"),
    ("logsumexp[weights]", lambda x, w: nn.logsumexp(x, axis=-1, b=w), "b, t", "b, t; positive"),
    ("logsumexp[keepdims]", lambda x: x - nn.logsumexp(x, axis=0, keepdims=True), "t, 3"),
    ("standardize[where]", lambda x, m: nn.standardize(x, where=m.at[:, 0].set(True), epsilon=0.1), "b, t", "b, t; boolean"),
    ("dot_product_attention[self]", _dpa, *_QKV),
    ("dot_product_attention[causal]", functools.partial(_dpa, is_causal=True), *_QKV),
    ("dot_product_attention[cross]", _dpa, *_CROSS),
    ("dot_product_attention[grouped heads]", _dpa, "b, t, 4, 4", "b, s, 2, 4", "b, s, 2, 4"),
    ("dot_product_attention[window]", functools.partial(_dpa, local_window_size=2), *_QKV),
    ("dot_product_attention[lengths]", lambda q, k, v, n: _dpa(q, k, v, key_value_seq_lengths=n + 1), *_CROSS, "b; index:s"),
    ("dot_product_attention[ALiBi]", alibi, *_QKV),
    ("scaled_matmul[b, 32]", lambda x, w: _scaled_matmul(x, w), "b, t, 32", "b, c, 32"),
    ("scaled_dot_general[matmul]", lambda x, w: nn.scaled_dot_general(x, w, (((1,), (1,)), ((), ())), configs=None), "b, 32", "c, 32"),
]
_LAYERS = [
    ("layer norm over 4 features", layer_norm, "b, t, 4"),
    ("layer norm over c features", layer_norm, "b, t, c"),
    ("layer norm over time", functools.partial(layer_norm, axis=1), "b, t, 4"),
    ("RMS norm over c features", rms_norm, "b, c"),
    ("batch norm", batch_norm, "b, t, 4"),
    ("group norm", group_norm, "b, t, 4"),
    ("dense c features", lambda x, w, y: nn.relu(x @ w + y), "b, c", "c, 4", "1, 4"),
    ("perceptron", lambda x, u, v: nn.relu(x @ u) @ v, "b, 4", "4, c", "c, 3"),
    ("gated perceptron", lambda x, u, v, w: (nn.silu(x @ u) * (x @ v)) @ w, "b, t, 4", "4, c", "4, c", "c, 4"),
    ("embedding", lambda w, i: w[i], "c, 4", "b, t; index:c"),
    ("embedding bag", lambda w, i: w[i].mean(1), "c, 4", "b, t; index:c"),
    ("tied logits", lambda x, w: x @ w.T, "b, t, 4", "c, 4"),
    ("attention", attention, *_CROSS),
    ("attention, causal", causal, *_QKV),
    ("attention, window", windowed, *_QKV),
    ("attention, key lengths", with_lengths, *_CROSS, "b; index:s"),
    ("attention, linear", linear_attention, "b, t, 3", "b, s, 3", "b, s, 4"),
    ("attention, one decoding step", decode_step, "b, 1, 4", "b, s, 4", "; index:s"),
    ("rotary embedding", rotary, "b, t, 4"),
    ("sinusoidal positions", sinusoids, "b, t, 4"),
    ("transformer block", block, "b, t, 8", *_WEIGHTS),
    ("language model loss", language_model, "b, t; index:11", "11, 8", *_WEIGHTS, "t >= 2"),
    ("cross-entropy over c classes", cross_entropy, "b, c", "b; index:c"),
    ("cross-entropy of tokens", masked_cross_entropy, "b, t, 5", "b, t; index:5", "b, t; boolean"),
    ("label smoothing", lambda x, i: -(nn.log_softmax(x) * (0.9 * nn.one_hot(i, x.shape[1]) + 0.1 / x.shape[1])).sum(-1), "b, c", "b; index:c"),
    ("binary cross-entropy", lambda x, y: (nn.softplus(x) - x * y).mean(), "b, t", "b, t; probability"),
    ("mean squared error", lambda x, y: ((x - y) ** 2).mean(), "b, t", "b, t"),
    ("accuracy", lambda x, i: (x.argmax(-1) == i).mean(dtype=jnp.float32), "b, c", "b; index:c"),
    ("contrastive b x b loss", contrastive, "b, 4", "b, 4"),
    ("cosine similarity", lambda x, y: (x * y).sum(-1) / (jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)), "b, t", "b, t"),
    ("triplet loss", lambda x, y: nn.relu(((x - y) ** 2).sum(-1) - ((x - jnp.roll(y, 1, 0)) ** 2).sum(-1) + 1).mean(), "b, 4", "b, 4"),
    ("KL divergence", lambda p, q: (nn.softmax(p) * (nn.log_softmax(p) - nn.log_softmax(q))).sum(-1).mean(), "b, c", "b, c"),
    ("GRU", gru, "3, 2, 4", "3, 4, 4", "t, b, 2"),
    ("LSTM", lstm, "5, 12", "t, b, 2"),
    ("RNN with lengths", masked_rnn, "3, 3", "t, b, 3", "b; index:t"),
    ("top-2 experts", experts, "t, 3", "3, 4", "4, 3, 3"),
    ("experts with capacity", experts_with_capacity, "t, 3", "3, 4", "4, 3, 3"),
    ("expert choice", expert_choice, "t, 3", "3, 4", "4, 3, 3", "t >= 2"),
    ("expert balance loss", balance_loss, "t, 3", "3, 4"),
    ("CTC loss", lambda x, i: ctc(nn.log_softmax(x), i), "t, 5", "s; index:5"),
    ("conv block", conv_block, "b, t, 4", "3, 4, 4"),
    ("image classifier", image_net, "b, s, t, 3", "3, 3, 3, 4", "4, 5"),
    ("global average pool", lambda x: x.mean((1, 2)), "b, s, t, 3"),
    ("down and up", unet, "b, 2*t"),
    ("patch embedding", patches, "b, 2*s, 2*t, 3", "12, 4"),
    ("deep sets", deep_sets, "b, t, 3", "3, 4"),
    ("graph convolution", graph, "t, 3", "s; index:t", "s; index:t"),
    ("graph attention weights", edge_softmax, "s", "s; index:t", "t, 3"),
    ("squeeze and excitation", lambda x: x * nn.sigmoid(x.mean((1,), keepdims=True)), "b, t, 4"),
    ("dropout by a given mask", lambda x, m: jnp.where(m, x / 0.8, 0.0), "b, t, 4", "b, t, 4; boolean"),
    ("cumulative mean", lambda x: jnp.cumsum(x, 1) / (1.0 + jnp.arange(x.shape[1], dtype=jnp.float32))[None, :], "b, t"),
    ("quantization to int8", lambda x: jnp.round(x / jnp.abs(x).max() * 127).astype(jnp.int8), "b, t"),
]
# fmt: on

PROGRAMS: tuple[Program, ...] = (
    *named("nn", nn, _ACTIVATIONS, "b, t"),
    *named("nn", nn, _EXACT_ACTIVATIONS, "b, t", exact=True),
    *_over_axes(),
    *table("nn.", _NN, exact=("one_hot",)),
    *table("neural: ", _LAYERS, exact=("embedding",)),
)
