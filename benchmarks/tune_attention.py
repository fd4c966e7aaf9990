"""flex_attention on a Hopper GPU: the fastest block sizes for a row of configs.py.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/tune_attention.py \
        --programs documents --channels 64 --blocks 64 128

needs a Python with jax's CUDA plugin. All `kernel_options` that fit registers, shared
memory and the mask's blocks are compiled, compared with the formula in float64 for one
head, and timed; those with a mean error above 1.1 of that of the formula in bfloat16
are struck off. Times are those of bench_attention_gpu.py. Prints a ranking for each
direction, in TFLOP/s of unmasked scores, and writes every candidate to a JSON file.
What it finds belongs into `TABLE` of pliax/kernels/attention/configs.py.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import pliax as px
from benchmarks import harness
from benchmarks.bench_attention_gpu import (
    PROGRAMS,
    Case,
    Entrant,
    formula,
    mean_errors,
    pass_in_jax,
    queue_ms,
)
from pliax.kernels.attention.configs import Kernel, Sizes
from pliax.kernels.attention.refinement import refined


OUTPUT = harness.RESULTS / "attention_tuning.json"
BAR = 1.1
ROWS, COLUMNS, STAGES = (64, 128, 192), (64, 128), (1, 2, 3)
PARTS = {"forward": slice(0, 1), "backward": slice(1, 4)}


@dataclass(frozen=True)
class Candidate:
    """One way to cut the blocks of a case.

    Attributes:
        direction: Forward or backward.
        block_size: The mask's.
        options: What is asked of the kernels.
    """

    direction: str
    block_size: int
    options: dict[str, int] = field(default_factory=dict)


def mask_of(case: Case, block_size: int) -> Any:
    """The case's, in blocks of that size; None if it has none."""
    mask_mod = case.mods(jnp)[1]
    return mask_mod and px.create_block_mask(
        mask_mod, None, None, case.S, case.S, block_size=block_size
    )


def kernels(case: Case, direction: str, block_size: int) -> list[str]:
    """Whose blocks the options of a direction cut."""
    if direction == "forward":
        return ["forward"]
    mask = mask_of(case, block_size)
    counts = case.B, case.H
    is_sparse = mask is not None and refined(mask, *counts).halves is not None
    return ["dq", "dkv"] if is_sparse or case.D > 128 else ["backward"]


def candidates(case: Case, direction: str, block_size: int) -> Iterator[Candidate]:
    """The table's choice, and everything that fits as it is asked for."""
    yield Candidate(direction, block_size)
    blocks = (block_size, block_size) if PROGRAMS[case.program].mask else None
    names = kernels(case, direction, block_size)
    every = [Kernel(x, (case.D, case.D), blocks) for x in names]
    prefix = "" if direction == "forward" else "bwd_"
    names = [f"{prefix}{x}" for x in ("block_q", "block_kv", "stages")]
    for sizes in product(ROWS, ROWS, STAGES):
        options = dict(zip(names, sizes, strict=True))
        if any(_is_as_asked(x, options) for x in every):
            yield Candidate(direction, block_size, options)


def _is_as_asked(kernel: Kernel, options: dict[str, int]) -> bool:
    rows, columns, stages = options.values()
    if kernel.name in ("backward", "dkv"):
        rows, columns = columns, rows
    if columns not in COLUMNS:
        return False
    asked = kernel.of(Sizes(rows // 64, columns, stages))
    return kernel.config(options) == asked


def entrant(case: Case, arrays: Sequence[Any], one: Candidate, quick: bool) -> Entrant:
    """The compiled pass, as the benchmark times it."""
    score_mod, mask = case.mods(jnp)[0], mask_of(case, one.block_size)
    attend = partial(
        px.flex_attention, score_mod=score_mod, block_mask=mask,
        implementation="mosaic_gpu",
        kernel_options=one.options | ({"interpret": 1} if quick else {}),
    )  # fmt: skip
    return pass_in_jax("pliax", one.direction, attend, arrays)


def measured(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every candidate of a case that is right, the fastest of a direction first."""
    arrays = case.arrays()
    on_device = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    golden = formula(case, jnp.float64, arrays)
    plain = mean_errors(formula(case, jnp.bfloat16, arrays), golden)
    every = [
        one
        for direction, size in product(options.directions, options.blocks)
        for one in candidates(case, direction, size)
    ]
    if options.quick:
        every = every[:2]
    build = partial(entrant, case, on_device, quick=options.quick)
    threads = 1 if options.quick else None  # the interpreter runs one at a time
    with ThreadPoolExecutor(threads) as pool:  # XLA compiles without Python's lock
        built = list(pool.map(build, every))
    found = []
    for one, made in zip(every, built, strict=True):
        part = PARTS[one.direction]
        errors = mean_errors(made.head(made.call()), golden[part])
        over = [e / p for e, p in zip(errors, plain[part], strict=True)]
        row = {**asdict(case), **asdict(one), "over_plain": over}
        if not max(over) <= BAR:  # also where it is NaN
            print(f"WRONG {row}", flush=True)
            continue
        clock = queue_ms(made, 1e-3 if options.quick else 0.02)
        times = [clock() for _ in range(options.samples)]
        work = (4 if one.direction == "forward" else 10) * case.D * case.scores
        median = float(np.median(times))
        rate = work / median / 1e9
        found.append(row | {"median_ms": median, "samples_ms": times, "tflops": rate})
    return sorted(found, key=lambda row: (row["direction"], row["median_ms"]))


def report(row: dict[str, Any]) -> None:
    asked = ", ".join(f"{name}={n}" for name, n in row["options"].items())
    print(
        f"{row['program']:>10} D={row['D']:<4}{row['direction']:<9}"
        f"mask {row['block_size']:<4}{row['median_ms']:8.3f} ms "
        f"{row['tflops']:5.0f} TFLOP/s  {asked or 'the table'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=["causal"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
    parser.add_argument("--channels", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--blocks", nargs="+", type=int, default=[128])
    parser.add_argument("--directions", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="tiny, interpreted, anywhere"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if options.quick:
        harness.prepare_interpreter()
    record, rows = harness.environment_record(), []
    for S, D, program in product(options.lengths, options.channels, options.programs):
        batch, heads = (1, 1) if options.quick else (max(2, 16384 // S), 16)
        rows += measured(Case(program, S, D, batch, heads), options)
        options.output.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
    for row in rows:
        report(row)


if __name__ == "__main__":
    main()
