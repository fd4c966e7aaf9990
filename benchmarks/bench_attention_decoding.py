"""flex_attention over a long cache: how fast keys and values are read.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/bench_attention_decoding.py

needs a Hopper GPU and a Python with jax's CUDA plugin and torch. 131,072 keys, 16 query
and 2 key heads of 128 channels, bfloat16; 1, 4 and 16 queries, 1 and 8 sequences.
`--keys` takes other lengths of the cache, for which there is no bar.
Lengths, masks and page tables are data that the compiled program is given. A time is
that of a call among many in one program, which share these and of which each has the
output of the one before as its query, as the layers of a model do; where keys and
values are small several of them take turns, as the GPU's cache could hold a part. They
are at most 16 (`stores`), or compiling would take minutes: of one sequence of 2,048
keys or fewer all fit into that cache. Torch's calls are replayed from a CUDA graph. A
call reads `bytes` of keys and values; that rate is given as a share of the rate of a
copy in the device's memory, which reads and writes. Errors are mean distances from the
formula in float64, of a single call, for the first sequence, and how many times as
large they are as those of the formula in bfloat16. `--programs`, `--queries`,
`--batches` and `--rivals` run a part; parts of the same tree and device are merged in
the file.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px
from benchmarks import harness
from pliax.kernels import masks, mods, paging


OUTPUT = Path(__file__).parent / "results" / "attention_decoding.json"
BAR, PAGE, CAP = 0.8, 128, 30.0
KEYS = 131072  # for which the bar is
AT_LEAST = 2**28  # bytes of keys and values that take turns: 5 times the GPU's cache
STORES = 16  # that take turns at most, as each is a call that is compiled
CALLS = 32  # in a row: a loop on the device takes 4 us a turn
# By the first guess of a call, which is long: 40 to 70. XLA takes 0.4 ms or more to
# start a program, whatever is in it.
QUEUE_MS = 100.0
PROGRAMS = ("none", "lengths", "ALiBi", "soft cap", "pages", "pages, ALiBi")
OURS = {"pliax": "mosaic_gpu", "pliax xla": "xla"}
TORCH = ("none", "lengths", "ALiBi", "soft cap")


@dataclass(frozen=True)
class Case:
    """One program at one size."""

    program: str
    T: int
    B: int
    S: int = KEYS
    H: int = 16
    K: int = 2
    D: int = 128

    @property
    def bytes(self) -> int:
        """Of keys and values, all of which are seen."""
        return 4 * self.B * self.S * self.K * self.D

    @property
    def is_paged(self) -> bool:
        """Whether keys are in a store that all sequences share."""
        return self.program.startswith("pages")

    def score_mod(self, lengths: Any) -> Any:
        """On logical positions; `lengths` are the tokens before the new ones."""
        if "ALiBi" in self.program:
            return mods.with_offset(mods.alibi(self.H), lengths)
        return mods.soft_cap(CAP) if self.program == "soft cap" else None

    def mask_mod(self, lengths: Any) -> Any:
        """On logical positions, likewise."""
        return (
            masks.noop_mask
            if self.program == "none"
            else masks.with_offset(masks.causal, lengths)
        )


@dataclass(frozen=True)
class Inputs:
    """What a call is given: arrays, and `data` that says how they are used."""

    query: Any
    stores: Any  # pairs of keys and values, which take turns
    data: Any  # lengths, block mask, page table


@dataclass(frozen=True)
class Entrant:
    """Who computes a case: milliseconds of a call, and the first sequence's output."""

    name: str
    sample: Callable[[], float]
    output: np.ndarray
    compile_s: float


# --- inputs ---------------------------------------------------------------------------


def inputs(case: Case) -> Inputs:
    keys = jax.random.split(jax.random.key(0), 2 * STORES + 1)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    shape = (case.B, case.S, case.K, case.D)
    if case.is_paged:
        shape = (1, case.B * case.S, case.K, case.D)
    copies = stores_of(case) if jax.default_backend() == "gpu" else 1
    stores = [
        tuple(normal(key, shape) for key in keys[2 * n : 2 * n + 2])
        for n in range(copies)
    ]
    query = normal(keys[-1], (case.B, case.T, case.H, case.D))
    return Inputs(query, stores, jax.jit(partial(_data, case))())


def stores_of(case: Case) -> int:
    """Pairs of keys and values that take turns on a GPU."""
    return min(STORES, max(1, AT_LEAST // case.bytes))


def _data(case: Case) -> dict[str, Any]:
    lengths = jnp.full(case.B, case.S - case.T, jnp.int32)
    if case.program == "none":
        return {"lengths": lengths}
    mask = px.create_block_mask(
        case.mask_mod(lengths), case.B, None, case.T, case.S, block_size=(case.T, PAGE)
    )
    if not case.is_paged:
        return {"lengths": lengths, "mask": mask}
    cache = _pages(case)
    rows = jnp.zeros((1, case.B * case.S, 1, 1), jnp.bfloat16)
    mask = paging.convert_block_mask(replace(cache, keys=rows), mask)
    return {"lengths": lengths, "mask": mask, "cache": cache}


def _pages(case: Case) -> px.kernels.PagedCache:
    """Shuffled pages, and a store that is kept apart."""
    pages = case.B * case.S // PAGE
    cache = px.kernels.PagedCache.create(
        case.B, pages, PAGE, 1, 1, max_pages=pages // case.B, dtype=jnp.bfloat16
    )
    table = jax.random.permutation(jax.random.key(9), pages).astype(jnp.int32)
    table = table.reshape(case.B, -1)
    logical = jnp.arange(pages // case.B, dtype=jnp.int32)
    inverse = jnp.full((case.B, pages), -1, jnp.int32)
    inverse = inverse.at[jnp.arange(case.B)[:, None], table].set(logical)
    none = jnp.zeros((1, 1, 1, 1), jnp.bfloat16)
    return replace(
        cache, page_table=table, physical_to_logical=inverse, keys=none, values=none,
        lengths=jnp.full(case.B, case.S, jnp.int32),
    )  # fmt: skip


# --- entrants -------------------------------------------------------------------------


def attend(case: Case, implementation: Any, query: Any, store: Any, data: Any) -> Any:
    score_mod = case.score_mod(data["lengths"])
    if case.is_paged and score_mod is not None:
        score_mod = paging.convert_score_mod(data["cache"], score_mod)
    return px.flex_attention(
        query, *store, score_mod=score_mod, block_mask=data.get("mask"),
        enable_gqa=True, implementation=implementation,
    )  # fmt: skip


def ours(case: Case, name: str, implementation: str, given: Inputs) -> Entrant:
    ms = 0.05 + case.bytes / 3e9  # a first guess
    times = max(1, CALLS // len(given.stores))
    calls = times * len(given.stores)
    turns = max(1, round(QUEUE_MS / ms / calls))
    call = jax.jit(partial(attend, case, implementation))

    @jax.jit
    def many(query: Any, stores: Any, data: Any) -> Any:
        def one(_: Any, query: Any) -> Any:
            for store in stores * times:
                query = attend(case, implementation, query, store, data)
            return query

        return jax.lax.fori_loop(0, turns, one, query)

    start = time.perf_counter()
    compiled = many.lower(given.query, given.stores, given.data).compile()
    seconds = time.perf_counter() - start

    def sample() -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(given.query, given.stores, given.data))
        return 1e3 * (time.perf_counter() - start) / turns / calls

    sample()
    output = call(given.query, given.stores[0], given.data)
    return Entrant(name, sample, np.asarray(output[0], np.float64), seconds)


def in_torch(case: Case, given: Inputs) -> Iterator[Entrant]:
    """Compiled flex_attention, and without a mod also scaled_dot_product_attention."""
    import torch  # pyright: ignore[reportMissingImports]  # the machine with the GPU has it
    from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
        flex_attention as flex,
    )

    torch._dynamo.reset()

    def heads_first(x: Any) -> Any:
        return torch.from_dlpack(x).transpose(1, 2).contiguous()

    query = heads_first(given.query)
    stores = [tuple(heads_first(x) for x in store) for store in given.stores]
    lengths = torch.full((case.B,), case.S - case.T, dtype=torch.int32, device="cuda")
    score_mod, mask = _torch_score_mod(case, torch, lengths), None
    if case.program != "none":

        def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
            return q + lengths[b] >= k

        mask = flex.create_block_mask(causal, case.B, None, case.T, case.S)
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def by_flex(store: Any) -> Any:
        return compiled(
            query, *store, score_mod=score_mod, block_mask=mask, enable_gqa=True
        )

    def by_sdpa(store: Any) -> Any:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, *store, enable_gqa=True)

    entrants = {"torch flex": by_flex}
    if case.program == "none":
        entrants["torch SDPA"] = by_sdpa
    for name, call in entrants.items():
        with torch.no_grad():
            yield _torch_entrant(torch, name, call, stores)


def _torch_score_mod(case: Case, torch: Any, lengths: Any) -> Any:
    slopes = torch.exp2(-8 / case.H * torch.arange(1, case.H + 1, device="cuda"))

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - slopes[h] * torch.abs(q + lengths[b] - k)

    def cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    return {"ALiBi": alibi, "soft cap": cap}.get(case.program)


def _torch_entrant(torch: Any, name: str, call: Any, stores: Any) -> Entrant:
    start = time.perf_counter()
    output = call(stores[0])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    graph, turns = torch.cuda.CUDAGraph(), max(1, 16 // len(stores))
    for store in stores:
        call(store)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for store in list(stores) * turns:
            call(store)

    def sample() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / turns / len(stores)

    sample()
    found = output[0].transpose(0, 1).double().cpu().numpy()
    return Entrant(name, sample, found, seconds)


# --- errors ---------------------------------------------------------------------------


def formula(case: Case, dtype: Any, given: Inputs) -> np.ndarray:
    """The first sequence's output, each step in one dtype."""
    store, data = given.stores[0], given.data
    if case.is_paged:
        paged = (x.reshape(-1, PAGE, case.K, case.D) for x in store)
        table = data["cache"].page_table[:1]
        store = tuple(x[table].reshape(1, -1, case.K, case.D) for x in paged)
    lengths = data["lengths"]

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("tngd,snd->ngts", q, k) * jnp.asarray(case.D**-0.5, dtype)
        h = jnp.arange(case.H).reshape(case.K, -1, 1, 1)
        at = (0, h, jnp.arange(case.T)[:, None], jnp.arange(case.S)[None])
        score_mod = case.score_mod(lengths)
        s = s if score_mod is None else score_mod(s, *at).astype(dtype)
        s = jnp.where(case.mask_mod(lengths)(*at), s, -jnp.inf)
        out = jnp.einsum("ngts,snd->tngd", jax.nn.softmax(s, axis=-1), v)
        return out.reshape(case.T, case.H, case.D)

    with jax.enable_x64(True):
        q, k, v = (x[0].astype(dtype) for x in (given.query, *store))
        q = q.reshape(case.T, case.K, -1, case.D)
        return np.asarray(jax.jit(attend)(q, k, v), np.float64)


# --- measurement ----------------------------------------------------------------------


def copy_rate(samples: int, size: int = 2**30) -> list[float]:
    """GB/s that a copy on the device reads and writes."""
    x, copy = jnp.ones(size // 4), jax.jit(jnp.copy)
    found = []
    for _ in range(samples + 1):
        start = time.perf_counter()
        jax.block_until_ready([copy(x) for _ in range(20)])
        found.append(2 * 20 * size / 1e9 / (time.perf_counter() - start))
    return found[1:]


def run_case(case: Case, options: argparse.Namespace, rate: float) -> list[Any]:
    given = inputs(case)
    golden = formula(case, jnp.float64, given)
    plain = float(np.abs(formula(case, jnp.bfloat16, given) - golden).mean())
    entrants = [
        ours(case, name, implementation, given)
        for name, implementation in OURS.items()
        if name in options.rivals
    ]
    if case.program in TORCH and "torch" in options.rivals:
        entrants += in_torch(case, given)
    turns = [[x.sample() for x in entrants] for _ in range(options.samples)]
    rows = []
    for entrant, times in zip(entrants, zip(*turns, strict=True), strict=True):
        error = float(np.abs(entrant.output - golden).mean())
        median = float(np.median(times))
        rows.append(
            {
                **asdict(case),
                "bytes": case.bytes,
                "stores": len(given.stores),
                "rival": entrant.name,
                "median_ms": median,
                "samples_ms": list(times),
                "gb_per_s": case.bytes / median / 1e6,
                "copy_gb_per_s": rate,
                "of_copy": case.bytes / median / 1e6 / rate,
                "mean_error": error,
                "over_plain": error / plain,
                "compile_s": entrant.compile_s,
            }
        )
        report(rows[-1])
    return rows


def report(row: dict[str, Any]) -> None:
    print(
        f"{row['program']:>13} T={row['T']:<3} B={row['B']:<2} S={row['S']:<7}"
        f"{row['rival']:<11}"
        f"{row['median_ms']:8.4f} ms {row['gb_per_s']:6.0f} GB/s "
        f"{row['of_copy']:5.2f} of copy  error {row['over_plain']:.2f} of plain  "
        f"compile {row['compile_s']:.1f} s",
        flush=True,
    )


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[x] for x in ("program", "T", "B", "S", "rival"))


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bar, and by how much it is met: there is one for 131,072 keys."""
    return [
        {
            "name": f"{row['program']} T={row['T']} B={row['B']}",
            "share": row["of_copy"],
            "bar": BAR,
            "passed": row["of_copy"] >= BAR,
        }
        for row in rows
        if row["rival"] == "pliax" and row["S"] == KEYS
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS)
    )
    parser.add_argument("--queries", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument(
        "--keys", nargs="+", type=int, help=f"multiples of {PAGE}; {KEYS} by default"
    )
    parser.add_argument("--samples", type=int, default=9)
    rivals = [*OURS, "torch"]
    parser.add_argument("--rivals", nargs="+", choices=rivals, default=rivals)
    parser.add_argument("--quick", action="store_true", help="tiny, anywhere")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    options.keys = options.keys or [512 if options.quick else KEYS]
    if any(n % PAGE or n < max(options.queries) for n in options.keys):
        parser.error(
            f"--keys must be multiples of {PAGE}, the size of a page, and at least "
            f"--queries ({max(options.queries)}), found {options.keys}"
        )
    if options.quick:
        options.rivals = ["pliax xla"]
    return options


def cases(options: argparse.Namespace) -> Iterator[Case]:
    sizes = options.keys, options.batches, options.queries
    for S, B, T, program in product(*sizes, options.programs):
        yield Case(program, T, B, S)


def main() -> None:
    options = parse()
    rates = copy_rate(options.samples, 2**20 if options.quick else 2**30)
    record = harness.environment_record() | {"copy_gb_per_s": rates}
    print(f"copy {np.median(rates):.0f} GB/s")
    rows = []
    for case in cases(options):
        rows += run_case(case, options, float(np.median(rates)))
        gc.collect()
        whole = harness.merged(options.output, record, rows, _key)
        bars = verdicts(whole["rows"])
        options.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**whole, "bars": bars}, indent=1)
        options.output.write_text(text + "\n")
    for bar in bars:
        verdict = "pass" if bar["passed"] else "MISS"
        print(f"{verdict}  {bar['name']}: {bar['share']:.2f} (>= {bar['bar']})")


if __name__ == "__main__":
    main()
