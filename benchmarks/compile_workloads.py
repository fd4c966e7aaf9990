"""What `bench_compile.py` trains and serves: a GPT in flax nnx, with optax.

    params, opt_state, tokens (B, t + 1)  ->  params, opt_state, loss

The functions are what a user would write for one length. The hand-padded step is what
a user would write for a bucket: tokens in a longer array, and a mask in the loss, since
a causal model never looks at what comes after.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


VOCABULARY = 256


@dataclass(frozen=True)
class Sizes:
    """Layers, channels and heads of a GPT."""

    layers: int = 6
    width: int = 64
    heads: int = 2


class Block(nnx.Module):
    """Attention and a gated MLP, each on a normalised copy of the residual stream."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Four projections of attention, three of the MLP."""
        width, self.heads = sizes.width, sizes.heads
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, t, width) to the same."""
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1)
        q, k, v = (y.reshape(heads) for y in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """Tokens to logits of the next token."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Embedding, blocks, norm, head."""
        self.embed = nnx.Embed(VOCABULARY, sizes.width, rngs=rngs)
        self.place = nnx.Embed(2048, sizes.width, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.head = nnx.Linear(sizes.width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """(B, t) to (B, t, 256)."""
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        x = self.embed(tokens) + self.place(places)[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Training:
    """A model's structure and its optimizer; `state` is (params, opt_state)."""

    graph: Any
    optimizer: optax.GradientTransformation
    state: Any

    def loss(self, params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy of (B, t)."""
        return jnp.mean(self._losses(params, tokens, targets))

    def step(self, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        """One step of AdamW; the new state and the loss before it."""
        value, gradients = jax.value_and_grad(self.loss)(state[0], tokens, targets)
        return self._updated(state, gradients), value

    def padded_step(
        self, state: Any, tokens: jax.Array, targets: jax.Array, length: jax.Array
    ) -> Any:
        """The same by hand: only the first `length` places count."""

        def loss(params: Any) -> jax.Array:
            losses = self._losses(params, tokens, targets)
            valid = jnp.arange(tokens.shape[1], dtype=jnp.int32) < length
            count = (tokens.shape[0] * length).astype(losses.dtype)
            return jnp.sum(jnp.where(valid[None], losses, 0.0)) / count

        value, gradients = jax.value_and_grad(loss)(state[0])
        return self._updated(state, gradients), value

    def _losses(self, params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits = nnx.merge(self.graph, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    def _updated(self, state: Any, gradients: Any) -> Any:
        params, opt_state = state
        updates, opt_state = self.optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state


def training(sizes: Sizes, seed: int = 0) -> Training:
    """A fresh model and the state of its optimizer."""
    graph, params = nnx.split(GPT(sizes, nnx.Rngs(seed)), nnx.Param)
    optimizer = optax.adamw(3e-4)
    return Training(graph, optimizer, (params, optimizer.init(params)))


def documents(lengths: Any, batch: int, seed: int = 0) -> list[tuple[Any, Any]]:
    """Tokens and targets of each length, (batch, length), int32."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, VOCABULARY, (batch, n + 1), np.int32) for n in lengths]
    return [(x[:, :-1].copy(), x[:, 1:].copy()) for x in texts]
