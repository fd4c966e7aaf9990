"""Learned biases in flex_attention on a Hopper GPU: what their gradients cost.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/bench_attention_learned.py

Forward and backward of six causal programs, with and without gradients of what their
score_mod captured: 16 heads, bfloat16, batch 4. `pliax` is its default, `pliax atomic`
the same with sums in any order, `pliax xla` what runs elsewhere, `formula` the same in
bfloat16 over whole scores, head by head, and `torch flex` torch's compiled
flex_attention, with the options that it finds where its default ones fit no GPU. Errors
are distances from the formula in float64: of the learned gradient, or, without, of dq
of one head; `same_bits` says whether two calls agree in these. `--programs`,
`--lengths` and `--channels` run a part; parts of the same tree and device are merged in
the file.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px
from benchmarks import harness
from pliax.kernels import masks


OUTPUT = harness.RESULTS / "attention_learned_gpu.json"
BUCKETS, DISTANCE = 32, 128  # of T5 (Raffel et al., 2020)
RIVALS = "pliax", "pliax atomic", "pliax xla", "formula", "torch flex"
TORCH = {"torch flex": None, "torch flex autotuned": "max-autotune-no-cudagraphs"}


def bucket(xp: Any, distance: Any) -> Any:
    """T5's, of keys before the query: exact up to 15, logarithmic up to 127."""
    exact, float32 = BUCKETS // 2, xp.float32
    distance = xp.where(distance > 0, distance, 0)
    ratio = xp.log(xp.where(distance > 0, distance, 1) / float32(exact))
    far = exact + ratio * float32(exact / np.log(DISTANCE / exact))
    far = xp.where(far < BUCKETS - 1, far, BUCKETS - 1)
    return xp.where(distance < exact, distance, far.astype("int32"))


PROGRAMS = {
    "slopes": lambda c, table, S: lambda s, b, h, q, k: s - c[h] * (q - k),
    "distances": lambda c, table, S: lambda s, b, h, q, k: s + c[h, q - k + S],
    "buckets": lambda c, table, S: lambda s, b, h, q, k: s + c[table[q - k + S], h],
    "gaps": lambda c, table, S: lambda s, b, h, q, k: s + c[h, abs(q - k)],
    "keys": lambda c, table, S: lambda s, b, h, q, k: s + c[h, k],
    "pairs": lambda c, table, S: lambda s, b, h, q, k: s + c[h, q, k],
}


@dataclass(frozen=True)
class Workload:
    """One program at one size, with or without the gradient of what it captured."""

    program: str
    S: int
    D: int
    is_learned: bool
    B: int = 4
    H: int = 16

    @property
    def name(self) -> str:
        """Of the case."""
        return self.program if self.is_learned else f"{self.program}, not learned"

    @cached_property
    def captured(self) -> np.ndarray:
        """The floats that the mod captures."""
        shapes = {
            "slopes": (self.H,),
            "distances": (self.H, 2 * self.S),
            "buckets": (BUCKETS, self.H),
            "gaps": (self.H, self.S),
            "keys": (self.H, self.S),
            "pairs": (self.H, self.S, self.S),
        }
        rng, shape = np.random.default_rng(1), shapes[self.program]
        return np.abs(0.1 * rng.standard_normal(shape, np.float32))

    def arrays(self) -> list[jax.Array]:
        """q, k, v and the output's cotangent."""
        keys = jax.random.split(jax.random.key(0), 4)
        shape = self.B, self.S, self.H, self.D
        return [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]

    def table(self) -> np.ndarray:
        """The bucket of each distance, from -S on."""
        return np.asarray(bucket(np, np.arange(-self.S, self.S)), np.int32)


# --- who computes it ------------------------------------------------------------------


def in_jax(attend: Any, workload: Workload, *arrays: Any) -> Any:
    """Gradients of q, k and v, and the learned one."""
    *given, d_out = arrays
    if not workload.is_learned:
        q, k, v, captured = given
        return jax.vjp(lambda *x: attend(*x, captured), q, k, v)[1](d_out)
    return jax.vjp(attend, *given)[1](d_out)


def ours(workload: Workload, implementation: str | None, **options: Any) -> Any:
    S, table = workload.S, jnp.asarray(workload.table())
    mask = px.create_block_mask(masks.causal, None, None, S, S)

    def attend(q: Any, k: Any, v: Any, captured: Any) -> Any:
        mod = PROGRAMS[workload.program](captured, table, S)
        return px.flex_attention(
            q, k, v, score_mod=mod, block_mask=mask, implementation=implementation,
            kernel_options=options or None,
        )  # fmt: skip

    return attend


def formula(workload: Workload) -> Any:
    """Steps in the dtype of the arrays, one head of one sequence after another.

    What is captured has its own dtype, in which its gradients are scattered.
    """
    S, table = workload.S, jnp.asarray(workload.table())

    @jax.checkpoint
    def head(at: Any, q: Any, k: Any, v: Any, captured: Any) -> Any:
        b, h = at
        q, k, v = (x[b, :, h] for x in (q, k, v))
        mod = PROGRAMS[workload.program](captured, table, S)
        row, column = jnp.arange(S)[:, None], jnp.arange(S)[None]
        s = (q @ k.T) * jnp.asarray(workload.D**-0.5, q.dtype)
        s = mod(s, b, h, row, column).astype(q.dtype)
        return jax.nn.softmax(jnp.where(row >= column, s, -jnp.inf), axis=-1) @ v

    def attend(*given: Any) -> Any:
        B, H = workload.B, workload.H
        at = jnp.repeat(jnp.arange(B), H), jnp.tile(jnp.arange(H), B)
        out = jax.lax.map(lambda n: head(n, *given), at)
        return jnp.swapaxes(out.reshape(B, H, S, -1), 1, 2)

    return attend


def outcome(workload: Workload, found: Any) -> Any:
    """What the oracle predicts."""
    x = found[3] if workload.is_learned else found[0][0, :, 0]
    return x.astype(jnp.float32)


def golden(workload: Workload) -> np.ndarray:
    with jax.enable_x64(True):
        *qkv, d_out = (x.astype(jnp.float64) for x in workload.arrays())
        given = *qkv, jnp.asarray(workload.captured, jnp.float64), d_out
        run = jax.jit(partial(in_jax, formula(workload), workload))
        found = run(*given)
        x = found[3] if workload.is_learned else found[0][0, :, 0]
        return np.asarray(x)


def in_torch(workload: Workload) -> Iterator[harness.Foreign]:
    """Compiled flex_attention, or lines that say why not."""
    for name, mode in TORCH.items():
        try:
            yield compiled_by_torch(workload, name, mode)
        except RuntimeError as error:  # no configuration fits the GPU
            print(f"{name}: {str(error).strip().splitlines()[0]}", flush=True)
        else:
            return


def compiled_by_torch(
    workload: Workload, name: str, mode: str | None
) -> harness.Foreign:
    """Compiled flex_attention, which was called once."""
    import torch  # pyright: ignore[reportMissingImports]  # the machine with the GPU has it
    from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
        flex_attention as flex,
    )

    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # bench_attention_gpu.py says why
    *qkv, d_out = (
        torch.from_dlpack(x).transpose(1, 2).contiguous() for x in workload.arrays()
    )
    captured = torch.as_tensor(workload.captured, device="cuda")
    leaves = [x.requires_grad_() for x in qkv]
    leaves += [captured.requires_grad_()] if workload.is_learned else []
    table, S = torch.as_tensor(workload.table(), device="cuda"), workload.S
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S)
    compiled = torch.compile(flex.flex_attention, dynamic=False, mode=mode)
    mod = PROGRAMS[workload.program](captured, table, S)

    def start() -> Any:
        out = compiled(*qkv, score_mod=mod, block_mask=mask)
        return torch.autograd.grad(out, leaves, d_out)

    def outcome(found: Any) -> Any:
        x = found[3] if workload.is_learned else found[0][0, 0]
        return x.float().cpu().numpy()

    start()
    return harness.Foreign(name, start, torch.cuda.synchronize, outcome)


# --- measurement ----------------------------------------------------------------------


def case(workload: Workload, rivals: list[str]) -> harness.Case:
    *qkv, d_out = workload.arrays()
    arguments = *qkv, jnp.asarray(workload.captured), d_out
    attends = {"pliax": ours(workload, None), "pliax xla": ours(workload, "xla")}
    if workload.is_learned:
        atomic = ours(workload, "mosaic_gpu", deterministic=False)
        attends["pliax atomic"] = atomic
    attends["formula"] = formula(workload)
    return harness.Case(
        workload.name,
        partial(golden, workload),
        tuple(
            harness.Rival(
                name,
                partial(in_jax, attend, workload),
                arguments,
                partial(outcome, workload),
            )
            for name, attend in attends.items()
            if name in rivals
        ),
        {"S": workload.S, "D": workload.D, "B": workload.B, "H": workload.H},
        partial(in_torch, workload) if "torch flex" in rivals else tuple,
        is_repeated=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    programs, rivals = list(PROGRAMS), list(RIVALS)
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
    parser.add_argument("--channels", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--rivals", nargs="+", choices=rivals, default=rivals)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny, anywhere")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def main() -> None:
    options = parse()
    small = {"B": 2, "H": 2} if options.quick else {}
    lengths = [96] if options.quick else options.lengths
    rivals = ["pliax", "formula"] if options.quick else options.rivals
    sizes = product(options.programs, lengths, options.channels, (False, True))
    workloads = (Workload(*size, **small) for size in sizes)
    measured = (case(workload, rivals) for workload in workloads)
    calls = 1 if options.quick else 20
    harness.run(
        measured,
        samples=options.samples,
        output=options.output,
        calls=calls,
        key=lambda row: tuple(row[name] for name in ("case", "S", "D", "rival")),
    )


if __name__ == "__main__":
    main()
