# %% [markdown]
# # Muon for hidden matrices, AdamW for the rest
#
#     uv run examples/04_muon.py --out out/muon
#
# Two small language models read the source of Python's own `argparse`: one is a dict
# whose layers are stacked for `jax.lax.scan`, one is made of flax nnx modules. Each is
# trained twice from the same start, with AdamW alone and with Muon for its matrices.

# %%
"""Train a dict model and an nnx model with Muon under optax.partition."""

import argparse
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import pliax as px


VOCABULARY, WIDTH, LAYERS, HEADS = 128, 64, 3, 4
BATCH, LENGTH, RATE = 8, 64, 3e-3
MatrixAxes = px.optim.MatrixAxes


# %% [markdown]
# ## 1. A dict of stacked layers
#
# `lax.scan` wants one array for all layers: [layer, inputs, outputs]. Query, key and
# value are one product, so their matrices lie side by side.


# %%
def initial(seed: int) -> dict[str, Any]:
    """Normal weights with a variance of 1 / inputs."""
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "layers": {
            "qkv": (LAYERS, WIDTH, 3 * WIDTH),
            "out": (LAYERS, WIDTH, WIDTH),
            "up": (LAYERS, WIDTH, 4 * WIDTH),
            "down": (LAYERS, 4 * WIDTH, WIDTH),
        },
        "head": (WIDTH, VOCABULARY),
    }
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)

    return jax.tree.map(normal, shapes, is_leaf=lambda x: isinstance(x, tuple))


def dict_logits(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """A decoder of attention and MLP layers, scanned."""

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = x + attention(normalised(x) @ weights["qkv"]) @ weights["out"]
        hidden = jax.nn.gelu(normalised(x) @ weights["up"])
        return x + hidden @ weights["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return normalised(x) @ params["head"]


def normalised(x: jax.Array) -> jax.Array:
    """Root mean square 1 along the channels."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(qkv: jax.Array) -> jax.Array:
    """Causal attention of query, key and value, which lie side by side."""
    rows, length, _ = qkv.shape
    q, k, v = (x.reshape(rows, length, HEADS, -1) for x in jnp.split(qkv, 3, axis=-1))
    mask = px.create_block_mask(px.kernels.masks.causal, None, None, length, length)
    attended = px.flex_attention(q, k, v, block_mask=mask)
    return attended.reshape(rows, length, -1)


# %% [markdown]
# `labels` places what it knows by name. Of stacked layers it cannot know that they are
# matrices, so a rule says it, and `axes` says which of their axes are what: a batch of
# layers, inputs, outputs; and three matrices in one for query, key and value.


# %%
def dict_optimizer() -> optax.GradientTransformation:
    """Muon for the layers, AdamW for embedding and head."""
    stacked = MatrixAxes(rows=2, columns=1, batch=0)
    fused = MatrixAxes(rows=2, columns=1, batch=0, split=(WIDTH,) * 3)
    layers = {"qkv": fused, "out": stacked, "up": stacked, "down": stacked}
    axes = {"embedding": None, "layers": layers, "head": None}
    labels = functools.partial(px.optim.labels, rules=[("^layers/", "muon")])
    return optax.partition({"muon": muon(axes=axes), "adamw": adamw()}, labels)


def muon(**options: Any) -> optax.GradientTransformation:
    """Muon with AdamW's learning rate; on several devices, each owns some matrices."""
    if jax.device_count() > 1:
        options["mesh"] = px.distributed.data_parallel_mesh()
    return px.optim.muon(RATE, 0.0, adjust_lr_fn="match_rms_adamw", **options)


def adamw() -> optax.GradientTransformation:
    """AdamW as it is usual for language models."""
    return optax.adamw(RATE, b2=0.95, weight_decay=0.0)


# %% [markdown]
# ## 2. The same model in flax nnx
#
# Each layer has parameters of its own: nothing has to be said, names say it all.


# %%
class Layer(nnx.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out_proj = linear(WIDTH, WIDTH)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The next layer's input."""
        x = x + self.out_proj(attention(self.qkv(normalised(x))))
        return x + self.down(jax.nn.gelu(self.up(normalised(x))))


class Decoder(nnx.Module):
    """Embedding, layers, head."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(normalised(x))


def nnx_optimizer() -> optax.GradientTransformation:
    """Muon for the kernels of the layers, AdamW for embedding and head."""
    return optax.partition({"muon": muon(), "adamw": adamw()}, px.optim.labels)


# %% [markdown]
# ## 3. Training


# %%
def batches(seed: int, steps: int) -> Iterator[np.ndarray]:
    """Pieces of a text, as bytes."""
    text = inspect.getsource(argparse).encode("ascii", "ignore")
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(data) - LENGTH - 1, BATCH)
        yield np.stack([data[i : i + LENGTH + 1] for i in starts])


def train(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    optimizer: optax.GradientTransformation,
    steps: int,
) -> list[float]:
    """The loss at every step."""

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        found = logits(params, batch[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(found, batch[:, 1:])
        return each.mean()

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for batch in batches(1, steps):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses


def runs(steps: int) -> dict[str, list[float]]:
    """The curves of both models with both optimizers."""
    graph, weights = nnx.split(Decoder(nnx.Rngs(0)))

    def nnx_logits(weights: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights)(tokens)

    models = {
        "dict": (dict_logits, initial(0), dict_optimizer()),
        "nnx": (nnx_logits, weights, nnx_optimizer()),
    }
    found = {}
    for name, (logits, params, optimizer) in models.items():
        found[f"{name}, Muon and AdamW"] = train(logits, params, optimizer, steps)
        found[f"{name}, AdamW"] = train(logits, params, adamw(), steps)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all four, print their last losses, draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/muon"))
    options = parser.parse_args(arguments)
    curves = runs(options.steps)
    for name, losses in curves.items():
        print(f"{name:22} {np.mean(losses[-20:]):.3f} nats per byte at the end")
    options.out.mkdir(parents=True, exist_ok=True)
    draw(curves, options.out / "curves.png")
    return 0


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Means of ten steps."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, losses in curves.items():
        whole = len(losses) // 10 * 10
        axes.plot(np.reshape(losses[:whole], (-1, 10)).mean(axis=1), label=name)
    axes.set_xlabel("tens of steps")
    axes.set_ylabel("nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
