"""A GPT in flax nnx: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The only thing it does not take from flax is attention: `px.flex_attention` with the
block mask of the batch, and dropout masks from an explicit `px.Generator`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pliax as px


VOCABULARY = 256


@dataclass(frozen=True)
class Sizes:
    """What decides the shapes of the parameters, the rate of dropout, the arithmetic.

    Parameters are float32; all layers compute in `dtype`, the head too.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    dropout: float
    dtype: str = "float32"


def document_causal(document: Int[Array, "B T"]) -> px.BlockMask:
    """A byte sees the earlier bytes of its own document."""
    rows, length = document.shape

    def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
        same = document[b, q_idx] == document[b, kv_idx]
        return same & (q_idx >= kv_idx)

    return px.create_block_mask(mask_mod, rows, None, length, length)


def rotary(x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
    """Rotate channel pairs by angles proportional to the position (Su et al., 2021)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def linear(
    inputs: int, outputs: int, sizes: Sizes, rngs: nnx.Rngs, scale: float = 1.0
) -> nnx.Linear:
    """A product without bias; variance scale / inputs."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        dtype=jnp.dtype(sizes.dtype),
        kernel_init=nnx.initializers.variance_scaling(scale, "fan_in", "normal"),
        rngs=rngs,
    )


def norm(sizes: Sizes, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Root mean square 1, times a learned scale."""
    return nnx.RMSNorm(sizes.width, dtype=jnp.dtype(sizes.dtype), rngs=rngs)


class Attention(nnx.Module):
    """Grouped-query attention over the documents of a row."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Four projections; key and value have fewer heads than query."""
        self.head = sizes.width // sizes.heads
        shared = sizes.kv_heads * self.head
        self.query = linear(sizes.width, sizes.width, sizes, rngs)
        self.key = linear(sizes.width, shared, sizes, rngs)
        self.value = linear(sizes.width, shared, sizes, rngs)
        self.out = linear(sizes.width, sizes.width, sizes, rngs, 1 / (2 * sizes.layers))

    def __call__(
        self, x: Float[Array, "B T C"], mask: px.BlockMask
    ) -> Float[Array, "B T C"]:
        """Each byte attends to what `mask` leaves it."""
        split = (*x.shape[:2], -1, self.head)
        q, k, v = (f(x).reshape(split) for f in (self.query, self.key, self.value))
        mixed = px.flex_attention(
            rotary(q), rotary(k), v, block_mask=mask, enable_gqa=True
        )
        return self.out(mixed.reshape(x.shape))


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x) (Shazeer, 2020), 8/3 as wide inside, in 32s."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Three products."""
        hidden = -(-sizes.width * 8 // 3 // 32) * 32
        self.gate = linear(sizes.width, hidden, sizes, rngs)
        self.up = linear(sizes.width, hidden, sizes, rngs)
        self.down = linear(hidden, sizes.width, sizes, rngs, 1 / (2 * sizes.layers))

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Each byte by itself."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and SwiGLU, each on a normalised copy of the residual stream."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Two sublayers."""
        self.attention_norm = norm(sizes, rngs)
        self.attention = Attention(sizes, rngs)
        self.mlp_norm = norm(sizes, rngs)
        self.mlp = SwiGLU(sizes, rngs)

    def __call__(
        self, x: Float[Array, "B T C"], mask: px.BlockMask
    ) -> Float[Array, "B T C"]:
        """Residual stream in, residual stream out."""
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """Bytes to logits of the next byte."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Embedding, blocks, norm, head."""
        self.rate = sizes.dropout
        dtype = jnp.dtype(sizes.dtype)
        self.embed = nnx.Embed(VOCABULARY, sizes.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = norm(sizes, rngs)
        self.head = linear(sizes.width, VOCABULARY, sizes, rngs)

    def __call__(
        self,
        inputs: Int[Array, "B T"],
        mask: px.BlockMask,
        gen: px.Generator | None = None,
    ) -> Float[Array, "B T 256"]:
        """Logits; with a Generator, dropout on the residual stream after each block."""
        x = self.embedded(inputs)
        for block in self.blocks:
            x = block(x, mask)
            if gen is not None and self.rate > 0:
                gen, x = dropout(gen, self.rate, x)
        return self.head(self.norm(x)).astype(jnp.float32)

    def embedded(self, inputs: Int[Array, "B T"]) -> Float[Array, "B T C"]:
        """Rows of the embedding, as a product.

        The gradient of a lookup adds up rows by atomic operations on a GPU, which wait
        for one another where a byte is frequent, as the space is: on an H200 a step of
        29M parameters took 63 instead of 21 ms.
        """
        dtype = self.embed.dtype
        table = self.embed.embedding[...].astype(dtype)
        return jax.nn.one_hot(inputs, VOCABULARY, dtype=dtype) @ table


def dropout(gen: px.Generator, rate: float, x: Array) -> tuple[px.Generator, Array]:
    """Zero a share `rate` of the elements and scale the others by 1 / (1 - rate)."""
    gen, keep = gen.bernoulli(1 - rate, x.shape)
    return gen, jnp.where(keep, x / (1 - rate), 0)


def initialise(gen: px.Generator, sizes: Sizes) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure, and its parameters drawn from a Generator."""

    def draw(gen: px.Generator) -> nnx.State:
        return nnx.split(GPT(sizes, nnx.Rngs(gen.key()[1])), nnx.Param)[1]

    graph = nnx.split(nnx.eval_shape(lambda: GPT(sizes, nnx.Rngs(0))), nnx.Param)[0]
    return graph, jax.jit(draw)(gen)
