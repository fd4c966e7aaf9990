"""Gram matrices and products with an addend against XLA's full products, on a GPU.

    python benchmarks/bench_matrix_products.py [--quick] [--output FILE]

A gram case is X X^T, a polynomial b A + c A A of a symmetric A, an update a X + A X.
The rival of the first is the full product; of the others XLA's product and sum; and of
all, where jax-triton is installed, the kernel of Triton. The oracle is float64, on the
same device.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from pliax.kernels.matrix_products import add_matmul, symmetric_matmul


A, B, C = 3.4445, -4.7750, 2.0315  # of Muon's quintic
TIMES = 5 * harness.COPIES
SHAPES = [
    (1, 1024, 1024), (1, 2048, 2048), (1, 4096, 4096), (1, 4096, 14336),
    (1, 8192, 8192), (72, 896, 4864), (48, 896, 896), (24, 896, 4864), (48, 128, 896),
    (48, 256, 1024), (5, 200, 328),
]  # fmt: skip
IN_TRITON = {"implementation": "triton"}


def rounded_sum(left: Any, right: Any, addend: Any, alpha: float, beta: float) -> Any:
    """As a user writes it who wants float32 sums."""
    product = jnp.matmul(left, right, preferred_element_type=jnp.float32)
    return (alpha * product + beta * addend.astype(jnp.float32)).astype(left.dtype)


def in_float64(function: Any, *args: Any) -> np.ndarray:
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in args]
        return np.asarray(jax.jit(function)(*wide))


def cases(shape: tuple[int, int, int]) -> Iterator[harness.Case]:
    """Made one after another: their arrays are large."""
    L, M, K = shape
    sizes = {"matrices": L, "rows": M, "depth": K}
    X = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    X = X / jnp.sqrt(K).astype(X.dtype)
    G = symmetric_matmul(X, implementation="xla")

    def case(
        kind: str, oracle: Any, arguments: Any, ours: Any, full: Any
    ) -> harness.Case:
        rivals = {"pliax": ours, "xla": full}
        if find_spec("jax_triton") is not None:
            rivals["triton"] = partial(ours, **IN_TRITON)
        made = (
            harness.Rival(name, f, arguments, times=TIMES) for name, f in rivals.items()
        )
        return harness.Case(
            f"{kind} {L}x{M}x{K}",
            partial(in_float64, oracle, *arguments),
            tuple(made),
            sizes,
        )

    yield case(
        "gram", lambda X: X @ X.mT, (X,),
        symmetric_matmul, lambda X: jnp.matmul(X, X.mT),
    )  # fmt: skip
    yield case(
        "polynomial", lambda G: C * G @ G + B * G, (G,),
        lambda G, **options: symmetric_matmul(G, G, alpha=C, beta=B, **options),
        lambda G: rounded_sum(G, G, G, C, B),
    )  # fmt: skip
    yield case(
        "update", lambda G, X: G @ X + A * X, (G, X),
        lambda G, X, **options: add_matmul(G, X, X, beta=A, **options),
        lambda G, X: rounded_sum(G, X, X, 1.0, A),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, for a test")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument(
        "--output", type=Path, default=harness.RESULTS / "matrix_products_gpu.json"
    )
    options = parser.parse_args()
    shapes = [(2, 32, 64)] if options.quick else SHAPES
    made = (case for shape in shapes for case in cases(shape))
    samples = 2 if options.quick else options.samples
    harness.run(made, samples=samples, output=options.output)


if __name__ == "__main__":
    main()
