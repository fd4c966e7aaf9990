"""Layers, losses and blocks as users write them, for the tables of neural programs."""

import jax
import jax.numpy as jnp
from jax import lax, nn


def layer_norm(x: jax.Array, axis: int = -1) -> jax.Array:
    centred = x - x.mean(axis, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(axis, keepdims=True) + 1e-5)


def rms_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def batch_norm(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - 1))
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5), mean, var


def group_norm(x: jax.Array) -> jax.Array:
    y = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    mean, var = y.mean((1, 3), keepdims=True), y.var((1, 3), keepdims=True)
    return ((y - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask=None) -> jax.Array:
    """Scaled dot-product attention of (b, t, h, d) with (b, s, h, d)."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
    scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", nn.softmax(scores, axis=-1), v)


def causal_mask(t, s=None) -> jax.Array:
    return jnp.tril(jnp.ones((t, t if s is None else s), bool))[None, None]


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention(q, k, v, causal_mask(q.shape[1]))


def windowed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    i = jnp.arange(q.shape[1])
    near = jnp.abs(i[:, None] - i[None, :]) <= 3
    return attention(q, k, v, near[None, None])


def with_lengths(q: jax.Array, k: jax.Array, v: jax.Array, n: jax.Array) -> jax.Array:
    seen = jnp.arange(k.shape[1])[None, :] <= n[:, None]
    return attention(q, k, v, seen[:, None, None, :])


def alibi(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    i = jnp.arange(q.shape[1], dtype=jnp.float32)
    bias = -0.5 * jnp.abs(i[:, None] - i[None, :])[None, None]
    return nn.dot_product_attention(q, k, v, bias=bias)


def heads(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    return y.reshape(*y.shape[:2], 2, -1)


def rotary(x: jax.Array) -> jax.Array:
    """Rotary embedding of (b, t, d): pairs of features turn with the position."""
    half = x.shape[-1] // 2
    frequency = 10.0 ** -jnp.arange(half, dtype=jnp.float32)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequency)[None]
    u, v = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([u * cos - v * sin, u * sin + v * cos], axis=-1)


def sinusoids(x: jax.Array) -> jax.Array:
    position = jnp.arange(x.shape[1], dtype=jnp.float32)
    angle = jnp.outer(position, jnp.array([1.0, 0.1]))
    return x + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)[None]


def block(x: jax.Array, qkv: jax.Array, out: jax.Array, up: jax.Array) -> jax.Array:
    """A pre-norm transformer block of width 8 with two heads, causal."""
    q, k, v = (heads(layer_norm(x), qkv[i]) for i in range(3))
    x = x + causal(q, k, v).reshape(x.shape) @ out
    return x + nn.gelu(layer_norm(x) @ up) @ up.T


def language_model(
    tokens: jax.Array, table: jax.Array, *weights: jax.Array
) -> jax.Array:
    x = block(sinusoids_of(table[tokens]), *weights)
    logits = layer_norm(x) @ table.T
    return next_token_loss(logits, tokens)


def sinusoids_of(x: jax.Array) -> jax.Array:
    i = jnp.arange(x.shape[1], dtype=jnp.float32)
    return x + jnp.sin(jnp.outer(i, jnp.linspace(0.1, 1.0, 8)))[None]


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    log_p = nn.log_softmax(logits[:, :-1], axis=-1)
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)
    return -picked.mean()


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (nn.logsumexp(logits, axis=-1) - picked(logits, labels)).mean()


def picked(x: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, labels[..., None], axis=-1)[..., 0]


def masked_cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array):
    loss = -picked(nn.log_softmax(logits), labels)
    return jnp.where(mask, loss, 0.0).sum() / jnp.maximum(
        mask.sum(dtype=jnp.float32), 1
    )


def contrastive(x: jax.Array, y: jax.Array) -> jax.Array:
    """The symmetric loss of b pairs: each row's own partner is on the diagonal."""
    x, y = (v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-3) for v in (x, y))
    logits = x @ y.T * 10.0
    i = jnp.arange(x.shape[0])
    return (cross_entropy(logits, i) + cross_entropy(logits.T, i)) / 2


def gru(w: jax.Array, u: jax.Array, xs: jax.Array) -> jax.Array:
    def step(h, x):
        z, r = nn.sigmoid(x @ w[0] + h @ u[0]), nn.sigmoid(x @ w[1] + h @ u[1])
        h = (1 - z) * h + z * jnp.tanh(x @ w[2] + (r * h) @ u[2])
        return h, h

    return lax.scan(step, jnp.zeros((xs.shape[1], 4)), xs)[1]


def lstm(w: jax.Array, xs: jax.Array) -> jax.Array:
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, axis=-1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((xs.shape[1], 3))
    return lax.scan(step, (zeros, zeros), xs)[1]


def masked_rnn(w: jax.Array, xs: jax.Array, n: jax.Array) -> jax.Array:
    def step(h, ix):
        new = jnp.tanh(h @ w + ix[1])
        return jnp.where((ix[0] <= n)[:, None], new, h), None

    steps = jnp.arange(xs.shape[0])
    return lax.scan(step, jnp.zeros(xs.shape[1:]), (steps, xs))[0]


def experts(x: jax.Array, gate: jax.Array, w: jax.Array) -> jax.Array:
    """Top-2 of 4 experts a token, every expert computed, two kept."""
    weights, chosen = lax.top_k(nn.softmax(x @ gate), 2)
    y = jnp.einsum("td,edf->tef", x, w)
    kept = jnp.take_along_axis(y, chosen[:, :, None], axis=1)
    return (weights[:, :, None] * kept).sum(1)


def experts_with_capacity(x: jax.Array, gate: jax.Array, w: jax.Array) -> jax.Array:
    """Each expert takes the first 4 tokens that choose it (a token too many is dropped)."""
    chosen = jnp.argmax(x @ gate, axis=-1)
    member = nn.one_hot(chosen, 4, dtype=jnp.int32)
    place = (jnp.cumsum(member, axis=0) * member).sum(-1) - 1
    buffer = jnp.zeros((4, 4, x.shape[-1])).at[chosen, place].set(x, mode="drop")
    y = jnp.einsum("ecd,edf->ecf", buffer, w)
    return y.at[chosen, place].get(mode="fill", fill_value=0.0)


def expert_choice(x: jax.Array, gate: jax.Array, w: jax.Array) -> jax.Array:
    """Each expert picks its two best tokens."""
    scores, tokens = lax.top_k((x @ gate).T, 2)
    y = jnp.einsum("ecd,edf->ecf", x[tokens], w) * nn.sigmoid(scores)[..., None]
    return jnp.zeros_like(x).at[tokens.reshape(-1)].add(y.reshape(-1, x.shape[-1]))


def balance_loss(x: jax.Array, gate: jax.Array) -> jax.Array:
    p = nn.softmax(x @ gate)
    load = nn.one_hot(p.argmax(-1), 4).mean(0)
    return 4 * (load * p.mean(0)).sum()


def ctc(log_p: jax.Array, labels: jax.Array) -> jax.Array:
    """-log p(labels) by CTC: frames (t, 5), s labels without repeats assumed."""
    states = 2 * labels.shape[0] + 1
    i = jnp.arange(states)
    symbol = jnp.where(i % 2 == 1, labels[jnp.minimum(i // 2, labels.shape[0] - 1)], 0)
    start = jnp.where(i < 2, log_p[0][symbol], -1e5)

    def step(alpha, frame):
        one = jnp.concatenate([jnp.full(1, -1e5), alpha[:-1]])
        two = jnp.concatenate([jnp.full(2, -1e5), alpha[:-2]])
        two = jnp.where(i % 2 == 1, two, -1e5)
        merged = nn.logsumexp(jnp.stack([alpha, one, two]), axis=0)
        return merged + frame[symbol], None

    alpha = lax.scan(step, start, log_p[1:])[0]
    return -jnp.logaddexp(alpha[-1], alpha[-2])


def conv_block(x: jax.Array, kernel: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return nn.relu(batch_norm(y)[0]) + x


def image_net(x: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    y = nn.relu(
        lax.conv_general_dilated(x, first, (1, 1), "SAME", dimension_numbers=numbers)
    )
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return y.mean((1, 2)) @ last


def unet(x: jax.Array) -> jax.Array:
    down = x.reshape(x.shape[0], -1, 2).mean(-1)
    up = jnp.repeat(jnp.tanh(down), 2, axis=1)
    return up + x


def patches(x: jax.Array, w: jax.Array) -> jax.Array:
    """A vision transformer's patch embedding with 2 by 2 patches."""
    b, s, t, c = x.shape
    y = x.reshape(b, s // 2, 2, t // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return y.reshape(b, (s // 2) * (t // 2), 4 * c) @ w


def graph(x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    n = x.shape[0]
    total = jax.ops.segment_sum(x[senders], receivers, num_segments=n)
    degree = jax.ops.segment_sum(jnp.ones(senders.shape), receivers, num_segments=n)
    return jnp.tanh(total / jnp.maximum(degree, 1.0)[:, None] + x)


def edge_softmax(score: jax.Array, receivers: jax.Array, x: jax.Array) -> jax.Array:
    n = x.shape[0]
    top = jax.ops.segment_max(score, receivers, num_segments=n)
    weight = jnp.exp(score - top[receivers])
    return weight / jax.ops.segment_sum(weight, receivers, num_segments=n)[receivers]


def decode_step(q: jax.Array, cache: jax.Array, i: jax.Array) -> jax.Array:
    """Write a key at the position, attend to all positions up to it."""
    cache = lax.dynamic_update_slice(cache, q, (0, i, 0))
    scores = jnp.einsum("btd,bsd->bts", q, cache)
    seen = (jnp.arange(cache.shape[1]) <= i)[None, None, :]
    return nn.softmax(jnp.where(seen, scores, -1e9), axis=-1) @ cache


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k = nn.elu(q) + 1, nn.elu(k) + 1
    kv = jnp.einsum("btd,bte->bde", k, v)
    return jnp.einsum("btd,bde->bte", q, kv) / (q @ k.sum(1)[:, :, None])


def deep_sets(x: jax.Array, w: jax.Array) -> jax.Array:
    h = nn.relu(x @ w)
    return jnp.concatenate([h.max(1), h.mean(1), h.sum(1)], axis=-1)
