"""Muon against `optax.contrib.muon`: one update of a tree of matrices.

    uv run --group bench benchmarks/bench_muon.py [--gpu] [--quick] [--output FILE]

On a CPU the trees have 12 layers of width 256 and 512. On a GPU they are the hidden
matrices of a 0.5B model and of eight layers of an 8B model. There whole steps are
timed as in a training loop: many are queued, and each is given the parameters and the
state of the last, which are donated. AdamW's are timed beside them, and with `--torch`
torch's; errors are those of the first step and layer.

The first update starts from zero momentum, where both compute the same function:
the momenta differ by a factor, which the orthogonalisation removes. So one float64
oracle judges both.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pliax as px
from benchmarks import harness


RATE, DECAY = 0.02, 0.1


@dataclass(frozen=True)
class Decoder:
    """A decoder with a gated MLP: layers, and the widths of its hidden matrices."""

    name: str
    layers: int
    width: int
    key_width: int
    hidden: int

    def tree(self, seed: int) -> dict[str, Any]:
        """Standard normal hidden matrices."""
        D, K, F = self.width, self.key_width, self.hidden
        shapes = {"wq": (D, D), "wk": (D, K), "wv": (D, K), "wo": (D, D)}
        shapes |= {"gate": (D, F), "up": (D, F), "down": (F, D)}
        keys = iter(jax.random.split(jax.random.key(seed), self.layers * len(shapes)))
        return {
            f"layer_{layer}": {
                name: jax.random.normal(next(keys), shape)
                for name, shape in shapes.items()
            }
            for layer in range(self.layers)
        }


ON_CPU = [Decoder(f"d={d}", 12, d, d, 4 * d) for d in (256, 512)]
ON_GPU = [Decoder("0.5B", 24, 896, 128, 4864), Decoder("8B", 8, 4096, 1024, 14336)]


def oracle(params: Any, grads: Any) -> Any:
    """The first update of Muon in float64, with layout "in_out"."""

    @jax.jit
    def update(W: Any, G: Any) -> Any:
        a, b, c = 3.4445, -4.7750, 2.0315
        X = (G if G.shape[0] <= G.shape[1] else G.T) / jnp.linalg.norm(G)
        for _ in range(5):
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        X = X if X.shape == W.shape else X.T
        rows, columns = W.shape
        return -RATE * (math.sqrt(max(1, columns / rows)) * X + DECAY * W)

    def in_float64(*matrices: Any) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(update(*(jnp.asarray(x, jnp.float64) for x in matrices)))

    return jax.tree.map(in_float64, params, grads)


def rival(name: str, tx: Any, params: Any, grads: Any) -> harness.Rival:
    arguments = (grads, tx.init(params), params)
    return harness.Rival(name, tx.update, arguments, lambda result: result[0])


def case(decoder: Decoder) -> harness.Case:
    params, grads = decoder.tree(seed=0), decoder.tree(seed=1)
    ours = {
        "pliax": px.optim.muon(RATE, DECAY),
        "pliax, stacked": px.optim.muon(RATE, DECAY, execution="stacked"),
        "pliax, gram": px.optim.muon(RATE, DECAY, ns_method="gram"),
    }
    optax_muon = optax.contrib.muon(RATE, weight_decay=DECAY)
    return harness.Case(
        decoder.name,
        lambda: oracle(params, grads),
        (
            *(rival(name, tx, params, grads) for name, tx in ours.items()),
            rival("optax", optax_muon, params, grads),
            rival("optax, bfloat16 gradients", _in_bfloat16(optax_muon), params, grads),
        ),
        {"width": decoder.width, "layers": decoder.layers},
    )


def step_cases(decoder: Decoder, has_torch: bool) -> Iterator[harness.Case]:
    """Whole steps, which add the update: of Muon, and of AdamW."""
    params, grads = decoder.tree(seed=0), decoder.tree(seed=1)
    muons = {
        "pliax": px.optim.muon(RATE, DECAY),
        "pliax, gram": px.optim.muon(RATE, DECAY, ns_method="gram"),
        "optax": optax.contrib.muon(RATE, weight_decay=DECAY),
    }

    def steps(name: str, first: Any, transformations: dict[str, Any]) -> harness.Case:
        in_torch = partial(torch_optimizer, name.endswith("AdamW"), params, grads)
        return harness.Case(
            name,
            first_layer_stepped(first, params, grads),
            tuple(step_rival(*x, params, grads) for x in transformations.items()),
            {"width": decoder.width, "layers": decoder.layers},
            (lambda: [in_torch()]) if has_torch else tuple,
        )

    yield steps(decoder.name, oracle, muons)
    adamw = optax.adamw(RATE, weight_decay=DECAY)
    yield steps(f"{decoder.name}, AdamW", first_adamw, {"optax": adamw})


def first_layer_stepped(first: Any, params: Any, grads: Any) -> Any:
    """The oracle: the first layer after a step, of which `first` says the update."""
    layers = params["layer_0"], grads["layer_0"]

    def stepped() -> Any:
        wide = [
            jax.tree.map(lambda x: np.asarray(x, np.float64), layer) for layer in layers
        ]
        return jax.tree.map(np.add, wide[0], first(*wide))

    return stepped


def first_adamw(params: Any, grads: Any) -> Any:
    """The mean and the root mean square of one gradient are itself."""
    return jax.tree.map(lambda W, G: -RATE * (np.sign(G) + DECAY * W), params, grads)


def step_rival(name: str, tx: Any, params: Any, grads: Any) -> harness.Rival:
    """A step that is given up its parameters and state, and tells the first layer."""

    def step(grads: Any, params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = (grads, params, tx.init(params))
    return harness.Rival(name, step, arguments, lambda x: x[0]["layer_0"], donated=2)


def torch_optimizer(is_adamw: bool, params: Any, grads: Any) -> harness.Foreign:
    """Torch's fused AdamW, or its Muon, which keeps matrices as (outputs, inputs)."""
    import torch  # pyright: ignore[reportMissingImports]  # the machine with the GPU has it

    def in_torch(x: Any) -> Any:
        return torch.from_dlpack(x).T.contiguous()

    leaves = [torch.nn.Parameter(in_torch(x)) for x in jax.tree.leaves(params)]
    for W, G in zip(leaves, jax.tree.leaves(grads), strict=True):
        W.grad = in_torch(G)
    if is_adamw:
        optimizer = torch.optim.AdamW(leaves, RATE, weight_decay=DECAY, fused=True)
    else:
        optimizer = torch.optim.Muon(leaves, RATE, weight_decay=DECAY)

    first = leaves[: len(params["layer_0"])]  # layers are in the order of their names

    def outcome(_: Any) -> Any:
        return [W.detach().T.cpu().numpy() for W in first]

    return harness.Foreign("torch", optimizer.step, torch.cuda.synchronize, outcome)


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
    parser.add_argument("--gpu", action="store_true", help="larger trees, whole steps")
    parser.add_argument("--torch", action="store_true", help="its steps, on a GPU")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    samples = 3 if options.quick else options.samples
    if not options.gpu:
        jax.config.update("jax_platforms", "cpu")
    decoders = ON_GPU if options.gpu else ON_CPU
    if options.quick:
        decoders = [Decoder("d=16", 1, 16, 16, 64)]
    cases: Iterable[harness.Case] = map(case, decoders)
    if options.gpu:
        cases = (x for d in decoders for x in step_cases(d, options.torch))
    output = options.output or harness.RESULTS / (
        "muon_gpu.json" if options.gpu else "muon_cpu.json"
    )
    calls = 20 if options.gpu and not options.quick else 1
    harness.run(cases, samples=samples, output=output, calls=calls)


if __name__ == "__main__":
    main()
