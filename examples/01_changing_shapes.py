# %% [markdown]
# # Changing shapes
#
#     uv run examples/01_changing_shapes.py --out out/shapes
#
# A recurrent classifier is trained on sequences of ever new lengths. `jax.jit` compiles
# for each length; `px.compile` traces once and runs in buckets, and every loss is that
# of the unpadded program.

# %%
"""Train on sequences of changing lengths with px.compile and with jax.jit."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

import pliax as px


WIDTH, CLASSES, BATCH = 32, 4, 8
LONGEST = 96


# %% [markdown]
# ## 1. A program that knows nothing of padding
#
# It reads `x` of any length, step by step, pools over all steps and classifies. It has
# no mask: the mean is over the true length, the scan over the true steps.


# %%
def logits(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """A gated recurrence over time, averaged over all steps."""

    def cell(h: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        update = jnp.tanh(step @ params["in"] + h @ params["recurrent"])
        gate = jax.nn.sigmoid(step @ params["gate"])
        h = gate * h + (1 - gate) * update
        return h, h

    start = jnp.zeros((x.shape[0], WIDTH), x.dtype)
    _, states = jax.lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
    return jnp.mean(states, axis=0) @ params["out"]


def train_step(
    params: dict[str, Any], x: jax.Array, label: jax.Array
) -> tuple[dict[str, Any], jax.Array]:
    """One step of gradient descent on the cross-entropy."""

    def loss(params: dict[str, Any]) -> jax.Array:
        log_p = jax.nn.log_softmax(logits(params, x), axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_p, label[:, None], axis=1))

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient), value


# %% [markdown]
# ## 2. Sequences of all lengths
#
# Each class is a frequency; a batch has sequences of one length, drawn anew each step.


# %%
def batches(seed: int, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Noisy waves and which frequency they have."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        length = int(np.clip(rng.gamma(3.0, 10.0), 4, LONGEST))
        label = rng.integers(CLASSES, size=BATCH)
        phase = rng.uniform(0, 2 * np.pi, (BATCH, 1))
        time_ = np.arange(length)[None, :]
        wave = np.sin(time_ * 0.3 * (1 + label[:, None]) + phase)
        noise = 0.1 * rng.standard_normal((BATCH, length))
        yield (wave + noise)[:, :, None].astype(np.float32), label.astype(np.int32)


def initial(seed: int) -> dict[str, Any]:
    """Small random weights."""
    shapes = {
        "in": (1, WIDTH),
        "gate": (1, WIDTH),
        "recurrent": (WIDTH, WIDTH),
        "out": (WIDTH, CLASSES),
    }
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(WIDTH)).astype(np.float32)
        for name, shape in shapes.items()
    }


# %% [markdown]
# ## 3. The same run twice
#
# One `Dim` with bounds: at most 14 executables, whatever lengths come.


# %%
def run(step: Callable[..., Any], steps: int) -> tuple[list[float], float]:
    """The losses of a run, and its seconds."""
    params, losses = initial(0), []
    start = time.perf_counter()
    for x, label in batches(1, steps):
        params, loss = step(params, x, label)
        losses.append(float(loss))
    return losses, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, compare, draw; 0 if every loss agrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/shapes"))
    options = parser.parse_args(arguments)
    length = px.Dim("t", min=4, max=LONGEST)
    compiled = px.compile(train_step, dims={"x": {1: length}}, padding="require")
    ours, our_seconds = run(compiled, options.steps)
    theirs, their_seconds = run(jax.jit(train_step), options.steps)
    lengths = [x.shape[1] for x, _ in batches(1, options.steps)]
    first = abs(ours[0] - theirs[0]) / theirs[0]
    print(compiled.explain())
    print(
        f"{len(set(lengths))} lengths: px.compile {compiled.stats.compilations} "
        f"executables, {our_seconds:.1f} s; jax.jit {len(set(lengths))} executables, "
        f"{their_seconds:.1f} s; first loss off by {first:.0e}, last losses "
        f"{np.mean(ours[-20:]):.3f} and {np.mean(theirs[-20:]):.3f}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    draw(lengths, sorted(_buckets(compiled)), options.out / "buckets.png")
    return 0 if np.allclose(ours, theirs, rtol=1e-2, atol=1e-3) else 1


def _buckets(compiled: Any) -> list[int]:
    """The longest length of each executable."""
    return [int(group.rpartition("=")[2]) for group in compiled.stats.groups]


# %% [markdown]
# ## 4. What the buckets waste


# %%
def draw(lengths: Sequence[int], buckets: Sequence[int], path: Path) -> None:
    """Each batch as a dot: its length, and the length it is padded to."""
    padded = [min(b for b in buckets if b >= n) for n in lengths]
    waste = 1 - sum(lengths) / sum(padded)
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(lengths, padded, ".", alpha=0.5)
    axes.plot([0, LONGEST], [0, LONGEST], color="gray", linewidth=1)
    axes.set_xlabel("length of the batch")
    axes.set_ylabel("length of its bucket")
    axes.set_title(f"{len(buckets)} buckets, {waste:.0%} of all elements are padding")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
