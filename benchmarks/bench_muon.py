"""Muon against `optax.contrib.muon`: one update of a 12-layer tree of matrices.

    uv run --group bench benchmarks/bench_muon.py [--quick] [--output FILE]

The first update starts from zero momentum, where both compute the same function:
the momenta differ by a factor, which the orthogonalisation removes. So one float64
oracle judges both.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pliax as px
from benchmarks import harness


RATE, DECAY = 0.02, 0.1


def tree(width: int, layers: int, seed: int) -> dict[str, Any]:
    """The hidden matrices of a decoder with a gated MLP of four times the width."""
    shapes = dict.fromkeys(("wq", "wk", "wv", "wo"), (width, width))
    shapes |= dict.fromkeys(("gate", "up"), (width, 4 * width))
    shapes |= {"down": (4 * width, width)}
    rng = np.random.default_rng(seed)
    return {
        f"layer_{layer}": {
            name: jnp.asarray(rng.standard_normal(shape), jnp.float32)
            for name, shape in shapes.items()
        }
        for layer in range(layers)
    }


def oracle(params: Any, grads: Any) -> Any:
    """The first update of Muon in float64, with layout "in_out"."""

    def update(W: Any, G: Any) -> np.ndarray:
        W, X = np.asarray(W, np.float64), np.asarray(G, np.float64)
        a, b, c = 3.4445, -4.7750, 2.0315
        X = (X if X.shape[0] <= X.shape[1] else X.T) / np.linalg.norm(X)
        for _ in range(5):
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        X = X if X.shape == W.shape else X.T
        rows, columns = W.shape
        return -RATE * (math.sqrt(max(1, columns / rows)) * X + DECAY * W)

    return jax.tree.map(update, params, grads)


def rival(name: str, tx: Any, params: Any, grads: Any) -> harness.Rival:
    arguments = (grads, tx.init(params), params)
    return harness.Rival(name, tx.update, arguments, lambda result: result[0])


def case(width: int, layers: int) -> harness.Case:
    params, grads = tree(width, layers, seed=0), tree(width, layers, seed=1)
    ours = {
        "pliax": px.optim.muon(RATE, DECAY),
        "pliax, stacked": px.optim.muon(RATE, DECAY, execution="stacked"),
        "pliax, gram": px.optim.muon(RATE, DECAY, ns_method="gram"),
    }
    optax_muon = optax.contrib.muon(RATE, weight_decay=DECAY)
    return harness.Case(
        f"d={width}",
        lambda: oracle(params, grads),
        (
            *(rival(name, tx, params, grads) for name, tx in ours.items()),
            rival("optax", optax_muon, params, grads),
            rival("optax, bfloat16 gradients", _in_bfloat16(optax_muon), params, grads),
        ),
        {"width": width, "layers": layers},
    )


def _in_bfloat16(tx: Any) -> optax.GradientTransformation:
    """The same optimizer fed with bfloat16 gradients and momentum."""

    def low(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tx.update(low(updates), state, params)

    return optax.GradientTransformation(lambda params: tx.init(low(params)), update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, for a test")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument(
        "--output", type=Path, default=harness.RESULTS / "muon_cpu.json"
    )
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    sizes = [(16, 1)] if options.quick else [(256, 12), (512, 12)]
    cases = [case(*size) for size in sizes]
    samples = 3 if options.quick else options.samples
    harness.run(cases, samples=samples, output=options.output)


if __name__ == "__main__":
    main()
