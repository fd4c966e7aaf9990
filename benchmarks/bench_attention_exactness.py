"""flex_attention on a Hopper GPU: errors of the fused kernels, at every odd size.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/bench_attention_exactness.py

Mean distance of output, log-sum-exp, gradients and captured gradients from the formula
in float64, over that of the formula in the working dtype: the bar is 1.1. Lengths that
are no multiple of anything, shared key heads, values wider or narrower than keys, 32 to
256 channels, float16. "unseen" masks leave keys to nobody and some queries without
keys; those hold NaN in the arrays and 0 in the formula. `--implementation triton` asks
the kernels in Triton, into a file of their own.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px
from benchmarks import harness
from benchmarks.attention_workloads import Program, documents
from benchmarks.bench_attention_gpu import PROGRAMS, table


OUTPUTS = {
    "mosaic_gpu": harness.RESULTS / "attention_exactness.json",
    "triton": harness.RESULTS / "attention_triton_exactness.json",
}
BAR = 1.1
NAMES = ("out", "lse", "dq", "dk", "dv", "captured")


def unseen(xp: Any, S: int) -> Any:
    """Causal; keys behind a sequence's end are seen by nobody, query 3 sees nothing."""
    ends = xp.asarray(np.asarray([S - 23, S // 2 + 5], np.int32))
    return lambda b, h, q, k: (q >= k) & (k < ends[b]) & (q != 3)


def unseen_documents(xp: Any, S: int) -> Any:
    """The same, in packed documents."""
    both = documents(xp, S), unseen(xp, S)
    return lambda *at: both[0](*at) & both[1](*at)


ALL = PROGRAMS | {
    "unseen": Program(mask=unseen),
    "documents, unseen": Program(mask=unseen_documents),
    "soft cap, unseen": replace(PROGRAMS["soft cap"], mask=unseen),
    "table, unseen": replace(PROGRAMS["table"], mask=unseen),
}


@dataclass(frozen=True)
class Case:
    """One program at one size; two sequences."""

    program: str
    S: int
    D: int
    V: int
    H: int = 4
    K: int = 4
    dtype: str = "bfloat16"

    def mods(self, floats: Sequence[Any]) -> tuple[Any, Any]:
        """score_mod, of what it captures, and mask_mod, or None."""
        program = ALL[self.program]
        score = program.score and program.score(jnp, self.H)
        if program.score is table:
            (bias,), S = floats, self.S
            score = lambda s, b, h, q, k: s + bias[q - k + S].astype(s.dtype)  # noqa: E731
        return score, program.mask and program.mask(jnp, self.S)

    def arrays(self) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Query, key and value; what the mod captures; cotangents."""
        rng, (S, H, K) = np.random.default_rng(0), (self.S, self.H, self.K)
        normal = partial(rng.standard_normal, dtype=np.float32)
        shapes = (2, S, H, self.D), (2, S, K, self.D), (2, S, K, self.V)
        floats = [normal((2 * S,))] if ALL[self.program].score is table else []
        cotangents = [normal((2, S, H, self.V)), normal((2, S, H))]
        return [normal(x) for x in shapes], floats, cotangents

    @property
    def differs_by_row(self) -> bool:
        """Whether the mask reads the number in the batch."""
        return ALL[self.program].mask in (unseen, unseen_documents)

    def strangers(self) -> list[Any]:
        """Which queries and keys take no part."""
        if not self.differs_by_row:
            return [False, False, False]
        place = np.arange(self.S)[None, :, None, None]
        ends = np.asarray([self.S - 23, self.S // 2 + 5])[:, None, None, None]
        return [place == 3, place >= ends, place >= ends]


CASES = [
    *(Case("causal", S, D, D) for S, D in ((257, 64), (1023, 128), (4095, 64))),
    *(Case(name, 1023, 64, 64) for name in ("window", "documents", "prefix", "alibi")),
    *(Case("causal", 1000, 128, 128, H=16, K=K) for K in (1, 4)),
    *(Case("causal", 1000, *x) for x in ((64, 128), (128, 64), (32, 80), (96, 256))),
    *(Case("documents", 1023, D, D, H=8, K=2) for D in (64, 128)),
    Case("dense", 1023, 256, 256),
    Case("soft cap", 1023, 128, 128, dtype="float16"),
    Case("table", 1023, 128, 128),
    Case("unseen", 1000, 64, 64),
    Case("unseen", 700, 128, 128, H=8, K=2),
    *(Case("documents, unseen", 1000, D, D, H=8, K=2) for D in (64, 128)),
    Case("soft cap, unseen", 700, 64, 64, dtype="float16"),
    Case("table, unseen", 700, 128, 128),
    Case("soft cap, unseen", 500, 256, 256),
    *(Case("causal", 1000, D, D) for D in (32, 80, 96)),
    Case("alibi", 257, 80, 80, dtype="float16"),
    Case("table", 4095, 64, 64, H=2, K=2),
    Case("table", 257, 80, 80, H=4, K=1, dtype="float16"),
    *(Case("table", S, D, D, H=1, K=1) for S in (4096, 16384) for D in (64, 128)),
]


def formula(case: Case, dtype: Any) -> list[np.ndarray]:
    """Everything, each step in one dtype, from arrays rounded to the case's."""

    def attend(qkv: Any, floats: Any) -> Any:
        score_mod, mask_mod = case.mods(floats)
        q, k, v = (jnp.repeat(x, case.H // x.shape[2], axis=2) for x in qkv)
        sizes = 2, case.H, case.S, case.S
        at = jnp.meshgrid(*map(jnp.arange, sizes), indexing="ij", sparse=True)
        s = jnp.einsum("bthd,bshd->bhts", q, k) * jnp.asarray(case.D**-0.5, dtype)
        s = s if score_mod is None else score_mod(s, *at).astype(dtype)
        visible = True if mask_mod is None else mask_mod(*at)
        s = jnp.where(visible, s, -jnp.inf)
        top = jax.lax.stop_gradient(s.max(axis=-1, keepdims=True))
        top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
        p = jnp.where(visible, jnp.exp(s - top), jnp.zeros_like(s))
        total = p.sum(axis=-1, keepdims=True)
        some = jnp.where(total == 0, jnp.ones_like(total), total)
        lse = jnp.where(total == 0, jnp.zeros_like(total), top + jnp.log(some))[..., 0]
        out = jnp.einsum("bhts,bshd->bthd", p / some, v)
        return out, jnp.swapaxes(lse, 1, 2)

    with jax.enable_x64(True):
        qkv, floats, cotangents = (
            [jnp.asarray(x, case.dtype).astype(dtype) for x in part]
            for part in case.arrays()
        )
        qkv = [jnp.where(n, 0, x) for n, x in zip(case.strangers(), qkv, strict=True)]
        results, vjp = jax.vjp(jax.jit(attend), qkv, floats)
        found = (*results, *jax.tree.leaves(vjp(tuple(cotangents))))
        return [np.asarray(x, np.float64) for x in found]


def ours(case: Case, implementation: Any, options: Any) -> list[np.ndarray]:
    """The same of the kernels; NaN in what takes no part."""
    qkv, floats, cotangents = (
        [jnp.asarray(x, case.dtype) for x in part] for part in case.arrays()
    )
    qkv = [jnp.where(n, jnp.nan, x) for n, x in zip(case.strangers(), qkv, strict=True)]
    _, mask_mod = case.mods(floats)
    batch = 2 if case.differs_by_row else None
    mask = mask_mod and px.create_block_mask(mask_mod, batch, None, case.S, case.S)

    def attend(qkv: Any, floats: Any) -> Any:
        out, aux = px.flex_attention(
            *qkv, score_mod=case.mods(floats)[0], block_mask=mask, enable_gqa=True,
            return_aux=px.AuxRequest(lse=True), implementation=implementation,
            kernel_options=options,
        )  # fmt: skip
        return out, jnp.where(aux.lse == -jnp.inf, 0, aux.lse)

    results, vjp = jax.vjp(jax.jit(attend), qkv, floats)
    d_out, d_lse = cotangents
    given = d_out, d_lse.astype(results[1].dtype)
    found = (*results, *jax.tree.leaves(jax.jit(vjp)(given)))
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in found]


def run_case(case: Case, implementation: Any, options: Any) -> dict[str, Any]:
    """A row: mean errors, and how many times the formula's they are."""
    golden, plain = (formula(case, x) for x in (jnp.float64, jnp.dtype(case.dtype)))

    def errors(found: Sequence[np.ndarray]) -> list[float]:
        pairs = zip(found, golden, strict=True)
        return [float(np.abs(x - y).mean()) for x, y in pairs]

    mine, theirs = errors(ours(case, implementation, options)), errors(plain)
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    row = {
        **asdict(case),
        "mean_errors": dict(zip(NAMES, mine, strict=False)),
        "over_plain": dict(zip(NAMES, ratios, strict=False)),
        "passed": all(x <= BAR for x in ratios),
    }
    sizes = f"{case.S} {case.H}/{case.K} {case.D}/{case.V} {case.dtype}"
    found = "  ".join(f"{n} {x:.2f}" for n, x in row["over_plain"].items())
    verdict = "pass" if row["passed"] else "MISS"
    print(f"{verdict}  {case.program:>16} {sizes:<26} {found}", flush=True)
    return row


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[x.name] for x in fields(Case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)))
    parser.add_argument(
        "--quick", action="store_true", help="tiny, interpreted, anywhere"
    )
    parser.add_argument("--implementation", choices=OUTPUTS, default="mosaic_gpu")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    output = options.output or OUTPUTS[options.implementation]
    if options.quick:
        harness.prepare_interpreter()
    record, rows = harness.environment_record(), []
    for case in (CASES[n] for n in options.cases):
        if options.quick:
            case = replace(case, S=70, H=case.H // case.K * 2, K=2)
        asked = {"interpret": 1} if options.quick else None
        rows.append(run_case(case, options.implementation, asked))
        whole = harness.merged(output, record, rows, _key)
        harness.write({**whole, "bar": BAR}, output)


if __name__ == "__main__":
    main()
