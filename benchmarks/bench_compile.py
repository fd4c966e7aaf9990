"""px.compile against jax.jit, hand-written padding and torch.compile(dynamic=True).

    uv run --group bench benchmarks/bench_compile.py [--quick] [--output FILE]
        [--rows dispatch training specialisation tracing]
        [--torch-python PATH | --without-torch]

    dispatch        microseconds of a call beyond jax.jit's own, before this process
                    has built anything else
    training        1,000 train steps of a 6-layer GPT over documents of 16 to 1024
    specialisation  a decode step with an executable of its own for one token
    tracing         seconds from a 12-layer train step to StableHLO

Each part prints what its bars ask, also where one is missed, and exits with 0.
"""

import argparse
import concurrent.futures
import functools
import gc
import itertools
import json
import multiprocessing
import os
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px
from benchmarks import harness, torch_compile_cpu, torch_worker
from benchmarks.compile_workloads import Sizes, Training, documents, training


SHORTEST, LONGEST = 16, 1024


def bar(name: str, value: float, limit: float, *, least: bool = False) -> dict:
    """One line of a verdict: a value and the most (or least) that passes."""
    passed = value >= limit if least else value <= limit
    sign = ">=" if least else "<="
    print(f"{'pass' if passed else 'MISS'}  {name}: {value:.4g} ({sign} {limit:g})")
    return {"name": name, "value": value, "bar": limit, "passed": bool(passed)}


# --- training -------------------------------------------------------------------------


def compiled_step(work: Training) -> Any:
    """The train step under px.compile, as a user writes it."""
    length = {1: px.Dim("t", min=SHORTEST, max=LONGEST)}
    return px.compile(work.step, dims={"tokens": length, "targets": length})


class ByHand:
    """The train step under jax.jit, with arrays padded to a list of lengths."""

    def __init__(self, work: Training, lengths: Callable[[int], int]):
        self._step, self._lengths = jax.jit(work.padded_step), lengths
        self.stages = Stages(self._step)

    def __call__(self, state: Any, tokens: Any, targets: Any) -> Any:
        """One step, on longer arrays."""
        n = tokens.shape[1]
        width = ((0, 0), (0, self._lengths(n) - n))
        padded = [np.pad(x, width) for x in (tokens, targets)]
        return self.stages(state, *padded, np.int32(n))


class Stages:
    """A jitted function, its stages timed where a call is the first of its shapes."""

    def __init__(self, jitted: Any):
        self._jitted, self._seen, self.seconds = jitted, set(), 0.0
        self.compilations = 0

    def __call__(self, *args: Any) -> Any:
        """One call."""
        shapes = tuple(x.shape for x in jax.tree.leaves(args[1:]))
        if shapes not in self._seen:
            start = time.perf_counter()
            self._jitted.trace(*args).lower().compile()
            self.seconds += time.perf_counter() - start
            self.compilations += 1
            self._seen.add(shapes)
        return self._jitted(*args)


def power_of_two(n: int) -> int:
    return max(SHORTEST, 1 << (n - 1).bit_length())


def draw_lengths(steps: int, distinct: int) -> list[int]:
    """Lengths of documents, each once before any comes again.

    As many are from 16 to 32 as from 512 to 1024: texts are more often short.
    """
    rng = np.random.default_rng(0)
    sizes = np.arange(SHORTEST, LONGEST + 1)
    once = rng.choice(sizes, distinct, replace=False, p=1 / sizes / sum(1 / sizes))
    again = rng.choice(once, steps - distinct, p=1 / once / sum(1 / once))
    return [int(n) for n in (*once, *again)]


def run_steps(step: Any, state: Any, batches: Sequence[Any]) -> dict[str, Any]:
    """A whole run from a state: seconds, and each step's."""
    times, losses = [], []
    for tokens, targets in batches:
        start = time.perf_counter()
        state, loss = step(state, tokens, targets)
        losses.append(float(loss))  # waits, as a loop that logs does
        times.append(1e3 * (time.perf_counter() - start))
    return {"seconds": sum(times) / 1e3, "steps_ms": times, "losses": losses}


def train(options: argparse.Namespace, worker: Any) -> dict[str, Any]:
    """Rows and bars of the training run."""
    sizes = Sizes(layers=1, width=16, heads=2) if options.quick else Sizes()
    steps, distinct = (12, 4) if options.quick else (options.steps, options.lengths)
    work, batch = training(sizes), 1
    order = draw_lengths(steps, distinct)
    batches = documents(order, batch)
    ours, exact = compiled_step(work), Stages(jax.jit(work.step))
    by_hand = ByHand(work, power_of_two)
    rows = {}
    for name, step in {"pliax": ours, "jax.jit": exact, "by hand": by_hand}.items():
        rows[name] = run_steps(step, work.state, batches)
        print(f"{name:>12}: {rows[name]['seconds']:.1f} s", flush=True)
    rows["pliax"] |= _our_costs(ours)
    for name, stages in {"jax.jit": exact, "by hand": by_hand.stages}.items():
        rows[name] |= {
            "compilations": stages.compilations,
            "stages_s": stages.seconds,
        }
    if worker is not None:
        shape = {"layers": sizes.layers, "width": sizes.width, "heads": sizes.heads}
        rows["torch"] = worker.ask(do="train", **shape, batch=batch, lengths=order)
        print(f"{'torch':>12}: {rows['torch']['seconds']:.1f} s", flush=True)
    firsts = batches[:distinct]
    steady = compare_steady(work, ours, order, 2 if options.quick else 7)
    errors = compare_losses(work.state, ours, exact, firsts)
    gradients = compare_gradients(work, firsts[:: max(1, distinct // 5)])
    ratio = rows["jax.jit"]["stages_s"] / rows["pliax"]["stages_s"]
    whole = rows["jax.jit"]["seconds"] / rows["pliax"]["seconds"]
    growth = max(g["pliax"] / g["jax.jit"] for g in gradients)
    bars = [
        bar("compilations", rows["pliax"]["compilations"], 14),
        bar("stages of jax.jit over ours", ratio, 10, least=True),
        bar("whole run of jax.jit over ours", whole, 3, least=True),
        bar("steady state over by hand", steady["ratio"], 1.15),
        bar("loss of a step, relative error", max(errors), 1e-5),
        bar("error of gradients over jax.jit's", growth, 2),
    ]
    return {
        "rows": rows,
        "lengths": order,
        "steady": steady,
        "loss_errors": errors,
        "gradient_errors": gradients,
        "bars": bars,
    }


def _our_costs(ours: Any) -> dict[str, Any]:
    stats = ours.stats
    stages = stats.trace_seconds + stats.lower_seconds + stats.compile_seconds
    return {
        "compilations": stats.compilations,
        "traces": stats.traces,
        "stages_s": stages,
        "waste": stats.waste,
    }


def buckets_of(ours: Any) -> list[int]:
    """The lengths of the executables that were built."""
    return sorted(int(group.split("=")[1]) for group in ours.stats.groups)


def compare_steady(
    work: Training, ours: Any, order: Sequence[int], samples: int
) -> dict[str, Any]:
    """Steps in each bucket, weighted by how often the run was in it, in turns."""
    buckets = buckets_of(ours)
    lengths = functools.partial(_first_that_holds, buckets)
    by_hand = ByHand(work, lengths)
    found, total = [], {"pliax": 0.0, "by hand": 0.0}
    for length, group in itertools.groupby(sorted(order), lengths):
        sizes = list(group)
        ((tokens, targets),) = documents([sizes[len(sizes) // 2]], 1)
        entrants = {"pliax": ours, "by hand": by_hand}
        times: dict[str, list[float]] = {name: [] for name in entrants}
        for turn in range(samples + 1):
            for name, step in entrants.items():
                start = time.perf_counter()
                jax.block_until_ready(step(work.state, tokens, targets))
                if turn:
                    times[name].append(1e3 * (time.perf_counter() - start))
        for name, samples_ms in times.items():
            total[name] += len(sizes) * float(np.median(samples_ms))
        found.append({"bucket": length, "steps": len(sizes), "samples_ms": times})
    return {"ratio": total["pliax"] / total["by hand"], "buckets": found}


def _first_that_holds(buckets: Sequence[int], n: int) -> int:
    return next(length for length in buckets if length >= n)


def compare_losses(
    state: Any, ours: Any, exact: Any, batches: Sequence[Any]
) -> list[float]:
    """Relative differences of the losses of one step from one state."""
    errors = []
    for tokens, targets in batches:
        state, wanted = exact(state, tokens, targets)
        _, found = ours(state, tokens, targets)
        _, wanted = exact(state, tokens, targets)
        errors.append(abs(float(found) - float(wanted)) / abs(float(wanted)))
    return errors


def compare_gradients(work: Training, batches: Sequence[Any]) -> list[dict[str, float]]:
    """Mean errors of both programs' gradients against the formula in float64."""
    gradient = jax.grad(work.loss)
    length = {1: px.Dim("t", min=SHORTEST, max=LONGEST)}
    ours = px.compile(gradient, dims={"tokens": length, "targets": length})
    params, found = work.state[0], []
    for tokens, targets in batches:
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
            golden = jax.tree.leaves(jax.jit(gradient)(wide, tokens, targets))
            golden = [np.asarray(x) for x in golden]
        row: dict[str, Any] = {"length": tokens.shape[1]}
        for name, f in {"pliax": ours, "jax.jit": jax.jit(gradient)}.items():
            leaves = jax.tree.leaves(f(params, tokens, targets))
            gaps = [
                np.abs(np.asarray(x, np.float64) - y).mean()
                for x, y in zip(leaves, golden, strict=True)
            ]
            row[name] = float(np.mean(gaps))
        found.append(row)
    return found


# --- specialisation -------------------------------------------------------------------


def decode(params: dict[str, Any], cache: Any, x: jax.Array) -> jax.Array:
    """(B, t, C) through layers of attention over a cache and the new tokens."""
    (batch, t), heads = x.shape[:2], 8
    for i in range(params["qkv"].shape[0]):
        q, k, v = jnp.split(x @ params["qkv"][i], 3, axis=-1)
        shape = (batch, t, heads, x.shape[-1] // heads)
        k, v = (
            jnp.concatenate([old, new.reshape(shape)], axis=1)
            for old, new in zip(cache[i], (k, v), strict=True)
        )
        mixed = jax.nn.dot_product_attention(q.reshape(shape), k, v)
        x = x + mixed.reshape(x.shape) @ params["out"][i]
        x = x + jax.nn.gelu(x @ params["up"][i]) @ params["down"][i]
    return x


def specialise(options: argparse.Namespace) -> dict[str, Any]:
    """One token in an executable of its own, and in the bucket of 128."""
    width, layers, past = (32, 1, 16) if options.quick else (512, 4, 512)
    batch = 4  # sequences served together
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / width**0.5, jnp.float32)

    params = {
        "qkv": draw(layers, width, 3 * width),
        "out": draw(layers, width, width),
        "up": draw(layers, width, 4 * width),
        "down": draw(layers, 4 * width, width),
    }
    cache = [
        [draw(batch, past, 8, width // 8) for _ in range(2)] for _ in range(layers)
    ]
    x, times, results = draw(batch, 1, width), {}, {}
    plain = {"buckets": [128]}
    special = {**plain, "specialize_on": [lambda t: t == 1]}
    entrants = {}
    for name, kind in {"bucket": plain, "special": special}.items():
        dim = px.Dim("t", min=1, max=128, **kind)
        entrants[name] = px.compile(decode, dims={"x": {1: dim}})
    entrants["jax.jit"] = jax.jit(decode)
    for name, f in entrants.items():
        results[name] = np.asarray(f(params, cache, x))
        times[name] = []
    for _ in range(5 if options.quick else 50):
        for name, f in entrants.items():
            start = time.perf_counter()
            jax.block_until_ready(f(params, cache, x))
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: float(np.median(samples)) for name, samples in times.items()}
    error = float(np.abs(results["special"] - results["jax.jit"]).max())
    ratio = medians["bucket"] / medians["special"]
    bars = [bar("bucket of 128 over specialised", ratio, 2, least=True)]
    return {"samples_ms": times, "median_ms": medians, "max_error": error, "bars": bars}


# --- dispatch -------------------------------------------------------------------------


CASES = tuple(itertools.product((2, 100, 500), (1, 16)))
PADDINGS = {"numpy": 5.0, "device": 30.0}


def dispatch(options: argparse.Namespace) -> dict[str, Any]:
    """A call's overhead by leaves and entries, and that of padding.

    The median of several processes, which get a GPU's memory beside this one.
    """
    if options.quick:
        runs = [_dispatch_once(options.quick)]
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.05")
        processes = range(options.processes)
        runs = [_in_a_process(_dispatch_once, False) for _ in processes]
    bars, rows = [], [_joined(found) for found in zip(*runs, strict=True)]
    for (leaves, entries), row in zip(CASES, rows[: len(CASES)], strict=True):
        name = f"{leaves} leaves, {entries} entries"
        print(f"      the least over jit, {name}: {row['least_us']:.3g}")
        print(f"      the same jit again, {name}: {row['twin_us']:.3g}")
        for text, over in ((name, "over_us"), (f"{name}, specialised", "fixed_us")):
            if leaves < 500:
                bars.append(bar(f"microseconds over jit, {text}", row[over], 1.0))
            else:
                share = row[over] / row["jit_us"]
                bars.append(bar(f"share over jit, {text}", share, 0.01))
    for (kind, limit), row in zip(PADDINGS.items(), rows[len(CASES) :], strict=True):
        print(f"      the least to pad, by hand, {kind}: {row['least_us']:.3g}")
        bars.append(bar(f"microseconds to pad, {kind}", row["over_us"], limit))
    return {"rows": rows, "bars": bars}


def _dispatch_once(quick: bool) -> list[dict[str, Any]]:
    rows = [_overhead(leaves, entries, quick) for leaves, entries in CASES]
    return rows + [_padding_overhead(kind, quick) for kind in PADDINGS]


def _in_a_process(f: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a new process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(f, *args).result()


def _joined(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of those of several processes: their medians, and each."""
    times = [name for name in found[0] if name.endswith("_us") and name != "samples_us"]
    medians = {name: float(np.median([row[name] for row in found])) for name in times}
    return {**found[0], **medians, "samples_us": [row["samples_us"] for row in found]}


def _overhead(leaves: int, entries: int, quick: bool) -> dict[str, Any]:
    def f(tree: Any, x: jax.Array) -> jax.Array:
        return x.sum()

    tree = {f"w{i}": jnp.ones(4) for i in range(leaves - 1)}
    dim = functools.partial(px.Dim, "t", min=1, max=32, buckets=[*range(2, 33, 2)])
    usual = dim(specialize_on=[lambda t: t == 2 * entries])
    ours, fixed = (px.compile(f, dims={"x": {0: d}}) for d in (dim(), usual))
    jitted = jax.jit(f)
    for n in range(1, entries + 1):
        for call in (ours, fixed, jitted):
            for _ in range(3):
                call(tree, jnp.ones(2 * n))
    x, sizes = jnp.ones(2 * entries), jnp.array([2 * entries])
    masked, twin = jax.jit(_masked_sum), jax.jit(lambda tree, x: f(tree, x))
    for _ in range(3):
        twin(tree, x)

    def least(tree: Any, x: jax.Array) -> jax.Array:
        return masked(tree, x, sizes)

    times = in_turns(
        {
            "pliax": lambda: ours(tree, x),
            "jit": lambda: jitted(tree, x),
            "fixed": lambda: fixed(tree, x),
            "least": lambda: least(tree, x),
            "twin": lambda: twin(tree, x),
        },
        quick,
    )
    row = {"leaves": leaves, "entries": entries, **_over(times)}
    # An executable for this size alone; what none with sizes beats; what means nothing.
    for name in ("fixed", "least", "twin"):
        row[f"{name}_us"] = _difference(times[name], times["jit"])
    return row


def _masked_sum(tree: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """The same sum with its size as an argument, which no dispatcher can do without."""
    return jnp.where(jnp.arange(x.shape[0]) < sizes[0], x, 0).sum()


def _padding_overhead(kind: str, quick: bool) -> dict[str, Any]:
    """A batch that needs padding against one that fills its bucket."""

    def f(batch: Any) -> jax.Array:
        return batch["tokens"].sum()

    make = jnp.ones if kind == "device" else np.ones
    dim = px.Dim("t", min=1, max=128, buckets=[128])
    ours, jitted = px.compile(f, dims={"batch['tokens']": {1: dim}}), jax.jit(f)
    short, full = ({"tokens": make((8, n), jnp.float32)} for n in (100, 128))
    for _ in range(3):
        for batch in (short, full):
            ours(batch)
            jitted(batch)
    place = jnp.asarray if kind == "device" else np.asarray
    tokens = np.asarray(short["tokens"])

    def by_hand() -> jax.Array:  # of a device's array too what is on the host is padded
        padded = np.zeros((8, 128), np.float32)
        padded[:, :100] = tokens
        return jitted({"tokens": place(padded)})

    times = in_turns(
        {
            "pliax": lambda: ours(short),
            "jit": lambda: ours(full),
            "by hand": by_hand,
            "filled": lambda: jitted(full),
        },
        quick,
    )
    least = _difference(times["by hand"], times["filled"])
    return {"padding": kind, **_over(times), "least_us": least}


def _over(times: dict[str, list[float]]) -> dict[str, Any]:
    """How much ours takes over `jit`, in the same turn, and the fastest of each."""
    ours, jit = times["pliax"], times["jit"]
    fastest = {"ours_us": min(ours), "jit_us": min(jit)}
    return {"over_us": _difference(ours, jit), **fastest, "samples_us": times}


def _difference(times: list[float], others: list[float]) -> float:
    """The median over turns: what slows the machine for a while slows both."""
    return float(np.median(np.subtract(times, others)))


def in_turns(
    calls: dict[str, Callable[[], Any]], quick: bool
) -> dict[str, list[float]]:
    """Microseconds of a call, the entrants taking turns of two milliseconds.

    In shorter turns each is slowed by what the other left in the caches; a longer one
    is seldom undisturbed.
    """
    rounds, least_s = (3, 1e-4) if quick else (300, 2e-3)
    first = next(iter(calls.values()))
    number = max(20, round(least_s / timeit.timeit(first, number=20) * 20))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in list(calls.items())[:: (-1) ** turn]:
            start = time.perf_counter()
            for _ in range(number):
                call()
            seconds = (time.perf_counter() - start) / number
            times[name].append(round(1e6 * seconds, 3))
    return times


# --- tracing --------------------------------------------------------------------------


def tracing(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds in trace and lower, each time from nothing.

    What one entrant left behind is collected before the other's turn.
    """
    sizes = Sizes(layers=1, width=16) if options.quick else Sizes(layers=12)
    work = training(sizes)
    ((tokens, targets),) = documents([500], 1)
    times: dict[str, list[float]] = {"pliax": [], "jax.jit": []}
    for turn in range(2 if options.quick else 6):
        _forget()
        ours = compiled_step(work)
        ours(work.state, tokens, targets)
        stats = ours.stats
        found = {"pliax": stats.trace_seconds + stats.lower_seconds}
        _forget()
        start = time.perf_counter()
        jax.jit(work.step).trace(work.state, tokens, targets).lower()
        found["jax.jit"] = time.perf_counter() - start
        for name, seconds in found.items():
            if turn:  # the first loads modules
                times[name].append(seconds)
    ratio = float(np.median(times["pliax"]) / np.median(times["jax.jit"]))
    bars = [bar("trace and lower over jax.jit's", ratio, 2)]
    return {"samples_s": times, "bars": bars}


def _forget() -> None:
    jax.clear_caches()
    gc.collect()


PARTS = ("dispatch", "training", "specialisation", "tracing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, for a test")
    parser.add_argument("--rows", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lengths", type=int, default=200)
    # With many arrays, what two processes measure differs by microseconds.
    parser.add_argument("--processes", type=int, default=7, help="of dispatch")
    parser.add_argument("--output", type=Path)
    torch_worker.add_options(parser)
    options = parser.parse_args()
    options.without_torch |= "training" not in options.rows
    platform = jax.default_backend()
    output = options.output or harness.RESULTS / f"compile_{platform}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        **harness.environment_record(),
        "command": torch_worker.command(),
    }
    with torch_worker.running(options, torch_compile_cpu.__file__) as worker:
        if worker is not None:
            record["versions"]["torch"] = worker.ask(do="versions")["torch"]
        parts = {
            "dispatch": lambda: dispatch(options),
            "training": lambda: train(options, worker),
            "specialisation": lambda: specialise(options),
            "tracing": lambda: tracing(options),
        }
        for name in (name for name in PARTS if name in options.rows):
            print(f"-- {name}", flush=True)
            record[name] = parts[name]()
            output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
