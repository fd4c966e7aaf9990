"""flex_attention on a Hopper GPU: the fused kernels against torch's and cuDNN's.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/bench_attention_gpu.py

needs a Python with jax's CUDA plugin and torch. Eight programs, 64 and 128 channels,
4,096 and 16,384 tokens, 16 heads, bfloat16, forward and backward apart, forward also
asked for lse and max_scores. A time is that of a call in a queue of calls, the median
of several queues; rivals take turns, in an order that changes. Short calls are several
in one executable, each of what the one before returns, and torch's in one CUDA graph:
for the host a call may be more work than for the GPU. These take turns with arrays that
lie elsewhere in memory. TFLOP/s count unmasked scores alone: 4 operations a score and
channel forward, 10 backward. torch takes its default options, and those it finds, in
about 20 s a case, if not told `--without-autotune`: the faster ones count. Who asks for
lse and max_scores takes turns with who does not, apart from the others. Errors are
mean distances from the formula in float64, for one head, and how many times as large
they are as those of the formula in bfloat16. `--triton` also runs
`implementation="triton"`. `--rows`, which are programs, `--lengths` and `--channels`
run a part; parts of the same tree and device are merged in the file. `--processes`
compile as many cases at once; what is measured, also by torch's autotuning, is measured
by one of them at a time.
"""

import argparse
import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, product, starmap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px
from benchmarks import harness
from benchmarks.attention_workloads import (
    Program,
    alibi,
    causal,
    document_ids,
    documents,
    soft_cap,
)


OUTPUT = Path(__file__).parent / "results" / "attention_gpu.json"
WINDOW = 1024
# Bars over torch flex with 64 and 128 channels, in both directions, and the others'.
FLEX_BARS = {"soft cap": (1.6, 2.0), "documents": (1.5, 1.5), "table": (1.5, 1.5)}
FORWARD_BARS = {"dense": (1.1, 1.15), "causal": (1.1, 1.15)}
OTHERS_BARS = {"forward": (1.15, 1.3), "backward": (1.25, 1.25)}
TRITON, TRITON_BAR = "pliax in Triton", 1.0
TORCH, AUTOTUNED = ("torch flex", "torch flex autotuned"), "max-autotune-no-cudagraphs"
CUDNN_BARS = {"forward": 0.95, "backward": 0.85}
SHORT_MS, TOGETHER_MS = 0.5, 1.0  # shorter calls are as many in one as take 1 ms
# Of a short call's arrays in memory. Of eight executables of a call (0.07 and 0.12 ms,
# documents on one H100) one took 1.15 to 1.17 times as long as the others, in every
# sample; between three places of one executable we saw 1.04 at most, on one H200.
PLACES = 3
ASKED, ASKED_BAR = "pliax, lse and max_scores", 1 / 1.03  # of the time without them
# So many times as many samples of both, in turns of their own: what a GPU's power
# allows makes samples differ by 10 percent, and the bar is 3.
ASKED_TIMES = 4
# Held by who keeps the GPU busy or measures it, where several processes prepare cases.
_turn: AbstractContextManager[Any] = nullcontext()


def window(xp: Any, S: int) -> Any:
    return lambda b, h, q, k: (q >= k) & (q - k < WINDOW)


def prefix(xp: Any, S: int) -> Any:
    return lambda b, h, q, k: (q >= k) | (k < S // 4)


def table(xp: Any, S: int) -> Any:
    bias = xp.asarray(np.random.default_rng(2).normal(size=2 * S).astype(np.float32))
    return lambda score, b, h, q, k: score + bias[q - k + S]


PROGRAMS = {
    "dense": Program(),
    "causal": Program(mask=causal),
    "alibi": Program(score=alibi, mask=causal),
    "soft cap": Program(score=soft_cap, mask=causal),
    "window": Program(mask=window),
    "documents": Program(mask=documents),
    "prefix": Program(mask=prefix),
    "table": Program(score=table, mask=causal),
}


@dataclass(frozen=True)
class Case:
    """One program at one size."""

    program: str
    S: int
    D: int
    B: int
    H: int = 16

    @property
    def scores(self) -> int:
        """How many are not masked."""
        S, rows = self.S, np.arange(1, self.S + 1)
        match self.program:
            case "dense":
                seen = S * S
            case "window":
                seen = int(np.minimum(rows, WINDOW).sum())
            case "prefix":
                seen = int(np.maximum(rows, S // 4).sum())
            case "documents":
                counts = np.bincount(document_ids(S)).astype(np.int64)
                seen = int((counts * (counts + 1) // 2).sum())
            case _:
                seen = int(rows.sum())
        return seen * self.B * self.H

    def mods(self, xp: Any) -> tuple[Any, Any]:
        """score_mod and mask_mod, or None."""
        program = PROGRAMS[self.program]
        size = self.S if self.program == "table" else self.H
        score = program.score and program.score(xp, size)
        return score, program.mask and program.mask(xp, self.S)

    def arrays(self) -> list[np.ndarray]:
        """q, k, v and the output's cotangent, of float32."""
        rng = np.random.default_rng(0)
        shape = (self.B, self.S, self.H, self.D)
        return [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]


@dataclass(frozen=True)
class Entrant:
    """Who computes a case: a call to be queued, the wait, and one head's results.

    `several` makes a call of so many calls, which the host has to queue but once; as
    many of these as it is told places, each with arrays of its own.
    """

    name: str
    direction: str
    call: Callable[[], Any]
    several: Callable[[int, int], list[Callable[[], Any]]]
    wait: Callable[[Any], Any]
    head: Callable[[Any], list[np.ndarray]]
    compile_s: float


# --- entrants -------------------------------------------------------------------------


def one_head(results: Any) -> list[np.ndarray]:
    return [
        np.asarray(x[0, :, 0].astype(jnp.float32)) for x in jax.tree.leaves(results)
    ]


def in_jax(name: str, attend: Any, arrays: Sequence[jax.Array]) -> Iterator[Entrant]:
    """Forward and backward of a function of q, k and v."""
    for direction in ("forward", "backward"):
        yield pass_in_jax(name, direction, attend, arrays)


def pass_in_jax(
    name: str, direction: str, attend: Any, arrays: Sequence[jax.Array]
) -> Entrant:
    """One of the two."""
    *qkv, d_out = arrays
    run, given = attend, tuple(qkv)
    if direction == "backward":
        _, vjp = jax.jit(partial(jax.vjp, attend))(*qkv)
        run, given = lambda d, vjp: vjp(d), (d_out, vjp)

    def several(count: int, places: int) -> list[Callable[[], Any]]:
        def chain(x: Any, *rests: Any) -> Any:
            found = []
            for rest in rests:
                found.append(run(x, *rest))
                x = jax.tree.leaves(found[-1])[0]
            # All are returned: XLA leaves out what nobody asks for.
            return found if count > 1 else found[0]

        def arguments() -> tuple[Any, ...]:
            """Arrays for each call: what depends on them alone is not for free."""
            x, *rest = jax.tree.map(jnp.copy, given)
            return x, rest, *(jax.tree.map(jnp.copy, rest) for _ in range(count - 1))

        there = [arguments() for _ in range(places)]
        compiled = jax.jit(chain).lower(*there[0]).compile()
        return [partial(compiled, *x) for x in there]

    start = time.perf_counter()
    (call,) = several(1, 1)
    seconds = time.perf_counter() - start
    wait = jax.block_until_ready
    return Entrant(name, direction, call, several, wait, one_head, seconds)


def attention(case: Case, options: Any, implementation: str = "mosaic_gpu") -> Any:
    """Ours, of q, k and v."""
    score_mod, mask_mod = case.mods(jnp)
    mask = mask_mod and px.create_block_mask(mask_mod, None, None, case.S, case.S)
    return partial(
        px.flex_attention, score_mod=score_mod, block_mask=mask,
        implementation=implementation, kernel_options=options,
    )  # fmt: skip


def ours(
    case: Case,
    arrays: Sequence[jax.Array],
    options: Any,
    implementation: str = "mosaic_gpu",
) -> Iterator[Entrant]:
    name = TRITON if implementation == "triton" else "pliax"
    yield from in_jax(name, attention(case, options, implementation), arrays)


def asked(case: Case, arrays: Sequence[jax.Array], options: Any) -> Entrant:
    """Forward, asked for lse and max_scores too."""
    request = px.AuxRequest(lse=True, max_scores=True)
    attend = partial(attention(case, options), return_aux=request)
    forward = pass_in_jax(ASKED, "forward", attend, arrays)

    def head(results: Any) -> list[np.ndarray]:
        out, aux = results
        return one_head((out, aux.lse))

    return replace(forward, head=head)


def cudnn(case: Case, arrays: Sequence[jax.Array]) -> Iterator[Entrant]:
    is_causal = case.program == "causal"
    attend = partial(
        jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn"
    )
    yield from in_jax("cuDNN", attend, arrays)


def torch_flex(
    case: Case, arrays: Sequence[np.ndarray], mode: str | None = None
) -> Iterator[Entrant]:
    """torch.compile(flex_attention), with its default options or autotuned."""
    import torch  # pyright: ignore[reportMissingImports]  # the machine with the GPU has it
    from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
        flex_attention as flex,
    )

    class Cuda:
        tanh = torch.tanh

        @staticmethod
        def asarray(x: Any) -> Any:
            return torch.as_tensor(x, device="cuda")

    torch._dynamo.reset()
    # No pool of processes: what that compiles, to autotune, is compiled again, one by
    # one, 20 of 37 s of a backward pass. Threads of this process do it once: 16 s.
    torch._inductor.config.compile_threads = 1
    score_mod, mask_mod = case.mods(Cuda)
    mask = mask_mod and flex.create_block_mask(mask_mod, None, None, case.S, case.S)
    heads_first = (torch.as_tensor(x).cuda().bfloat16().transpose(1, 2) for x in arrays)
    *qkv, d_out = (x.contiguous() for x in heads_first)
    torch.cuda.empty_cache()  # of the case before
    compiled = torch.compile(flex.flex_attention, dynamic=False, mode=mode)
    name, stream = TORCH[mode is not None], torch.cuda.Stream()
    torch.cuda.synchronize()  # what was made before is there for the stream

    def wait(result: Any) -> Any:
        torch.cuda.synchronize()
        return result

    def head(results: Any) -> list[np.ndarray]:
        results = results if isinstance(results, tuple) else (results,)
        return [x[0, 0].detach().float().cpu().numpy() for x in results]

    def several(make: Any, count: int, places: int) -> list[Callable[[], Any]]:
        def captured() -> Callable[[], Any]:
            here = [x.clone() for x in (*qkv, d_out)]
            torch.cuda.synchronize()  # they are there for the stream
            call, graph = make(here), torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(count):
                    call()
            return lambda call=call: graph.replay()  # with the arrays of its call

        return [captured() for _ in range(places)]

    def forward(arrays: Any) -> Any:
        def call(*qkv: Any) -> Any:
            with torch.no_grad(), torch.cuda.stream(stream):
                return compiled(*qkv, score_mod=score_mod, block_mask=mask)

        return partial(call, *arrays[:3])

    def backward(arrays: Any) -> Any:
        *qkv, d_out = arrays
        leaves = [x.detach().requires_grad_() for x in qkv]
        with torch.cuda.stream(stream):  # in which autograd then runs the backward pass
            out = compiled(*leaves, score_mod=score_mod, block_mask=mask)
        return partial(torch.autograd.grad, out, leaves, d_out, retain_graph=True)

    for make in (forward, backward):
        start = time.perf_counter()
        wait((call := make([*qkv, d_out]))())
        seconds = time.perf_counter() - start
        more = partial(several, make)
        yield Entrant(name, make.__name__, call, more, wait, head, seconds)


def autotune_in_turn(turn: AbstractContextManager[Any]) -> None:
    """Lets torch compile its choices beside other processes, and measure them alone."""
    from torch._inductor.select_algorithm import (  # pyright: ignore[reportMissingImports]
        AlgorithmSelectorCache as Choices,
    )

    measure = Choices.benchmark_choices

    def benchmark_choices(_: Any, *args: Any, **kwargs: Any) -> Any:
        with turn:
            return measure(*args, **kwargs)

    Choices.benchmark_choices = classmethod(benchmark_choices)


def if_it_compiles(entrants: Iterator[Entrant]) -> Iterator[Entrant]:
    """Without the passes for which torch finds no configuration; it says so."""
    try:
        yield from entrants
    except RuntimeError as error:
        print(f"torch flex: {str(error).strip().splitlines()[0]}", flush=True)


# --- errors ---------------------------------------------------------------------------


def formula(case: Case, dtype: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Output, lse and gradients of the first head, each step in one dtype."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        score_mod, mask_mod = case.mods(jnp)
        at = (0, 0, jnp.arange(case.S)[:, None], jnp.arange(case.S)[None])
        s = (q @ k.T) * jnp.asarray(case.D**-0.5, dtype)
        s = s if score_mod is None else score_mod(s, *at).astype(dtype)
        s = s if mask_mod is None else jnp.where(mask_mod(*at), s, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v, jax.nn.logsumexp(s, axis=-1)

    with jax.enable_x64(True):
        half = (jnp.asarray(x[0, :, 0], jnp.bfloat16).astype(dtype) for x in arrays)
        *qkv, d_out = half
        out, vjp, lse = jax.vjp(jax.jit(attend), *qkv, has_aux=True)
        return [np.asarray(x, np.float64) for x in (out, lse, *vjp(d_out))]


def mean_errors(
    found: Sequence[np.ndarray], golden: Sequence[np.ndarray]
) -> list[float]:
    pairs = zip(found, golden, strict=True)
    return [float(np.abs(x.astype(np.float64) - y).mean()) for x, y in pairs]


# --- measurement ----------------------------------------------------------------------


def queue_ms(entrant: Entrant, queue_s: float = 0.02) -> Callable[[], float]:
    """Milliseconds of a call among as many as take `queue_s`."""

    def measure(call: Any, count: int) -> float:
        entrant.wait(call())
        start, result = time.perf_counter(), None
        for _ in range(count):
            result = call()
        entrant.wait(result)
        return 1e3 * (time.perf_counter() - start) / count

    with _turn:
        measure(entrant.call, 3)
        single = measure(entrant.call, 3)
    if single >= SHORT_MS:
        count = max(3, round(1e3 * queue_s / single))
        return lambda: measure(entrant.call, count)
    places = entrant.several(together := round(TOGETHER_MS / single), PLACES)
    with _turn:
        fastest = min(measure(x, 3) for x in places)
    count = max(3, round(1e3 * queue_s / fastest))
    turns = cycle(places)
    return lambda: measure(next(turns), count) / together


def in_turns(clocks: Sequence[Callable[[], float]], samples: int) -> list[list[float]]:
    """The samples of each, every turn in an order of its own.

    What a GPU's power allows depends on who ran before: 7 percent between entrants that
    always followed the same one (no mask, 16,384 tokens of 128 channels, one H200).
    """
    rng, times = np.random.default_rng(0), [[] for _ in clocks]
    for _ in range(samples):
        for n in rng.permutation(len(clocks)):
            times[n].append(clocks[n]())
    return times


def samples_of(
    entrants: Sequence[Entrant], clocks: Sequence[Callable[[], float]], samples: int
) -> tuple[list[list[float]], list[float]]:
    """Milliseconds of each, and of pliax in turns with who asks for more alone."""
    names = [x.name for x in entrants]
    if ASKED not in names:
        return in_turns(clocks, samples), []
    asked, ours = names.index(ASKED), names.index("pliax")
    others = [x for n, x in enumerate(clocks) if n != asked]
    times, pair = in_turns(others, samples), [clocks[asked], clocks[ours]]
    more, without = in_turns(pair, ASKED_TIMES * samples)
    return [*times[:asked], more, *times[asked:]], without


def run_case(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    gc.collect()  # arrays of the case before
    arrays = case.arrays()
    on_device = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    interpreted = {"interpret": 1} if options.quick else None
    entrants = list(ours(case, on_device, interpreted))
    entrants.append(asked(case, on_device, interpreted))
    if options.triton:
        entrants += ours(case, on_device, None, "triton")
    if not options.quick:
        if case.program in ("dense", "causal"):
            entrants += cudnn(case, on_device)
        if not options.without_torch:
            entrants += if_it_compiles(torch_flex(case, arrays))
            if not options.without_autotune:
                entrants += if_it_compiles(torch_flex(case, arrays, AUTOTUNED))
    with _turn:
        golden = formula(case, jnp.float64, arrays)
        plain = mean_errors(formula(case, jnp.bfloat16, arrays), golden)
    rows = []
    for direction, first in (("forward", 0), ("backward", 2)):
        here = [x for x in entrants if x.direction == direction]
        clocks = [queue_ms(x, 1e-3 if options.quick else 0.02) for x in here]
        with _turn:
            all_times, without = samples_of(here, clocks, options.samples)
        for entrant, times in zip(here, all_times, strict=True):
            found, again = (
                entrant.head(entrant.wait(entrant.call())) for _ in range(2)
            )
            again = zip(found, again, strict=True)
            part = slice(first, first + len(found))
            errors = mean_errors(found, golden[part])
            per_score = 4 if direction == "forward" else 10
            work, median = per_score * case.D * case.scores, float(np.median(times))
            rows.append(
                {
                    **asdict(case),
                    "direction": direction,
                    "rival": entrant.name,
                    "median_ms": median,
                    "samples_ms": list(times),
                    **({"without_ms": without} if entrant.name == ASKED else {}),
                    "tflops": work / median / 1e9,
                    "mean_errors": errors,
                    "over_plain": [
                        e / p for e, p in zip(errors, plain[part], strict=True)
                    ],
                    "same_again": all(np.array_equal(x, y) for x, y in again),
                    "compile_s": entrant.compile_s,
                }
            )
            report(rows[-1])
    return rows


def _take_turns(turn: AbstractContextManager[Any], options: argparse.Namespace) -> None:
    """The first that a process of several does."""
    global _turn
    _turn = turn
    if options.quick:
        harness.prepare_interpreter()
    elif not (options.without_torch or options.without_autotune):
        autotune_in_turn(turn)


def each_case(
    cases: Sequence[Case], options: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    """Rows of one case after another, in the order in which they are ready.

    Raises:
        ExceptionGroup: At the end, of what went wrong in other processes.
    """
    if options.processes == 1:
        yield from (run_case(case, options) for case in cases)
        return
    context = multiprocessing.get_context("spawn")
    first = partial(_take_turns, context.Lock(), options)
    with ProcessPoolExecutor(options.processes, context, first) as pool:
        futures = [pool.submit(run_case, x, options) for x in cases]
        for done in as_completed(futures):
            if error := done.exception():
                print(f"a case could not be measured: {error!r}", flush=True)
            else:
                yield done.result()
    errors = [x for x in map(Future.exception, futures) if isinstance(x, Exception)]
    if errors:
        raise ExceptionGroup("some cases could not be measured", errors)


def report(row: dict[str, Any]) -> None:
    print(
        f"{row['program']:>10} S={row['S']:<6} D={row['D']:<4} {row['direction']:<9}"
        f"{row['rival']:<11}{row['median_ms']:8.3f} ms {row['tflops']:6.0f} TFLOP/s  "
        f"error {max(row['over_plain']):.2f} of plain  "
        f"compile {row['compile_s']:.1f} s",
        flush=True,
    )


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bar, and by how much it is met."""
    times = {_key(row): row["median_ms"] for row in rows}
    found = []
    for row in (x for x in rows if x["rival"].startswith("pliax")):
        program, wide = row["program"], row["D"] >= 128
        special = FLEX_BARS | (FORWARD_BARS if row["direction"] == "forward" else {})
        bar = special.get(program, OTHERS_BARS[row["direction"]])[wide]
        bars: dict[tuple[str, ...], float] = {TORCH: bar}
        if row["rival"] == ASKED:
            bars = {("pliax",): ASKED_BAR}
        if row["rival"] == TRITON:
            bars[TORCH] = TRITON_BAR
        elif program in ("dense", "causal") and row["rival"] != ASKED:
            bars[("cuDNN",)] = CUDNN_BARS[row["direction"]]
        for rivals, bar in bars.items():
            given = [times.get(_key({**row, "rival": x})) for x in rivals]
            if row["rival"] == ASKED:
                given = [float(np.median(row["without_ms"]))]
            if known := [x for x in given if x is not None]:
                ratio, rival = min(known) / row["median_ms"], rivals[0]
                name = f"{program} S={row['S']} D={row['D']} {row['direction']} {rival}"
                name += row["rival"].removeprefix("pliax")
                found.append(
                    {"name": name, "ratio": ratio, "bar": bar, "passed": ratio >= bar}
                )
    return found


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[x] for x in ("program", "S", "D", "direction", "rival"))


def cases_of(options: argparse.Namespace) -> list[Case]:
    def case(S: int, D: int, program: str) -> Case:
        batch, heads = (1, 2) if options.quick else (max(2, 16384 // S), 16)
        return Case(program, S, D, batch, heads)

    return [*starmap(case, product(options.lengths, options.channels, options.rows))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--channels", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument(
        "--triton", action="store_true", help='implementation="triton", too'
    )
    parser.add_argument(
        "--without-autotune", action="store_true", help="torch's default options alone"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny, interpreted, anywhere"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="that prepare cases, one GPU for all"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if options.quick:
        harness.prepare_interpreter()
    record, rows = harness.environment_record(), []
    for found in each_case(cases_of(options), options):
        rows += found
        whole = harness.merged(options.output, record, rows, _key)
        bars = verdicts(whole["rows"])
        options.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**whole, "bars": bars}, indent=1)
        options.output.write_text(text + "\n")
    for bar in bars:
        verdict = "pass" if bar["passed"] else "MISS"
        print(f"{verdict}  {bar['name']}: {bar['ratio']:.2f} (>= {bar['bar']:.3g})")


if __name__ == "__main__":
    main()
