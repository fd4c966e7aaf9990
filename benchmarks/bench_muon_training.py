"""Muon against AdamW from end to end: the example's GPT with 30M parameters.

    python benchmarks/bench_muon_training.py [--steps N] [--quick] [--output FILE]

Every learning rate of both optimizers, for every seed: AdamW trains for N steps, Muon
for 0.75 N, each with a warmup and a cosine of its own length, on at most one epoch. A
seed sets the initial weights and the batches, which are the same for both. The claims:
a Muon step costs at most 1.05 of an AdamW step, and Muon's best rate ends with a
held-out loss that is at most that of AdamW's best rate.

The file is written after every run. A file of the same code, protocol and device is
continued: its runs are not made again, and other rates and seeds are added.
"""

import argparse
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pliax as px
from benchmarks import harness, muon_training_workload as workload
from benchmarks.muon_training_verdicts import Row, report, verdicts
from benchmarks.muon_training_workload import (
    FULL,
    MUON_SHARE,
    OPTIMIZERS,
    QUICK,
    Programs,
    Protocol,
    UserError,
    build,
    check,
    held_out_batches,
    load_corpus,
    training_batches,
)


# Steps of about sqrt(2). Muon's updates are as large as AdamW's at the same rate.
RATES = {
    "adamw": (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3),
    "muon": (1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2),
}
SEEDS = (0, 1, 2)
type Run = tuple[str, float, int]  # optimizer, peak learning rate, seed


# --- measuring ------------------------------------------------------------------------


def step_costs(
    programs: Programs,
    protocol: Protocol,
    weights: Any,
    batches: Any,
    samples: int,
    calls: int,
) -> dict[str, Any]:
    """Milliseconds of a step of each optimizer in turns, on one batch.

    The rate is zero, so that both keep computing one loss, which says that they do.
    """
    states = {name: programs.start[name](weights) for name in OPTIMIZERS}
    scalars = np.int32(0), np.float32(0), np.int32(protocol.steps)
    times: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    losses = {}
    for _ in range(samples + 1):  # the first warms up
        for name in OPTIMIZERS:
            began = time.perf_counter()
            for _ in range(calls):
                states[name], loss = programs.step[name](
                    states[name], batches, *scalars
                )
            jax.block_until_ready(states[name])
            times[name].append(1e3 * (time.perf_counter() - began) / calls)
            losses[name] = float(loss)
    kept = {name: found[1:] for name, found in times.items()}
    ratios = [b / a for a, b in zip(kept["adamw"], kept["muon"], strict=True)]
    return {
        "calls": calls,
        "samples_ms": kept,
        "median_ms": {name: statistics.median(found) for name, found in kept.items()},
        "ratio": statistics.median(ratios),
        "losses": losses,
        "programs": programs.costs,
    }


def train(
    programs: Programs,
    protocol: Protocol,
    run: Run,
    weights: Any,
    batches: Any,
    held_out: Any,
) -> Row:
    """One run; the steps of a chunk are queued without waiting for any."""
    name, peak, seed = run
    total = protocol.total(name)
    state = programs.start[name](weights)
    curve, training, seconds = [], [], []
    for first in range(0, total, protocol.chunk):
        began, losses = time.perf_counter(), []
        for index in range(first, first + protocol.chunk):
            state, loss = programs.step[name](
                state, batches, np.int32(index), np.float32(peak), np.int32(total)
            )
            losses.append(loss)
        training.append(float(np.mean(jax.device_get(losses))))
        seconds.append(time.perf_counter() - began)
        value = float(programs.evaluate(state.params, held_out))
        curve.append((first + protocol.chunk, value))
        if not math.isfinite(value):
            break
    diverged = not math.isfinite(curve[-1][1])
    return {
        "optimizer": name,
        "learning_rate": peak,
        "seed": seed,
        "steps": total,
        "diverged": diverged,
        "final": None if diverged else curve[-1][1],
        "curve": [point for point in curve if math.isfinite(point[1])],
        "training_losses": [x if math.isfinite(x) else None for x in training],
        "seconds": seconds,
    }


# --- the file -------------------------------------------------------------------------


def code_digest() -> str:
    """Of what decides a run's numbers; git's tree would hold the results, too."""
    state = hashlib.blake2b(digest_size=8)
    files = [
        *harness.ROOT.glob("pliax/**/*.py"),
        *harness.ROOT.glob("examples/lm/*.py"),
    ]
    for path in sorted([*files, Path(__file__), Path(workload.__file__)]):
        state.update(path.read_bytes())
    return state.hexdigest()


def continued(output: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record with the runs of an earlier file, which must be of the same kind.

    Raises:
        UserError: If it is not.
    """
    if not output.exists():
        return record
    old = json.loads(output.read_text())
    kept = json.loads(json.dumps(record))  # tuples are lists in a file
    for one in (old, kept):
        one.get("device", {}).pop("cpu", None)  # any host will do
    keys = ("code", "protocol", "corpus", "versions", "device")
    if other := [key for key in keys if old.get(key) != kept[key]]:
        raise UserError(
            f"{output} holds runs with another {', '.join(other)}; name another"
            " --output or remove it"
        )
    return record | {key: old[key] for key in ("step_cost", "rows")}


def save(output: Path, record: dict[str, Any]) -> None:
    """Judge and write."""
    record |= verdicts(record["step_cost"], record["rows"])
    harness.write(record, output)


def runs_to_make(options: argparse.Namespace, rows: list[Row]) -> Iterator[Run]:
    """Seed by seed, optimizers in turns, without what the file has."""
    made = {(x["optimizer"], x["learning_rate"], x["seed"]) for x in rows}
    rates = [(name, rate) for name in OPTIMIZERS for rate in options.rates[name]]
    rates.sort(key=lambda x: (options.rates[x[0]].index(x[1]), x[0]))
    for seed in options.seeds:
        yield from ((*x, seed) for x in rates if (*x, seed) not in made)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, for a test")
    parser.add_argument("--steps", type=int, help="of an AdamW run")
    parser.add_argument("--adamw-rates", nargs="+", type=float)
    parser.add_argument("--muon-rates", nargs="+", type=float)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--data", type=Path, help="a folder; else Python's library")
    parser.add_argument("--glob", default="*.py", help="which files of the folder")
    parser.add_argument("--precision", default="default", help="of float32 products")
    parser.add_argument("--samples", type=int, help="of a step's cost")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    asked = {"adamw": options.adamw_rates, "muon": options.muon_rates}
    few = 2 if options.quick else None
    options.rates = {name: asked[name] or RATES[name][:few] for name in OPTIMIZERS}
    options.seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    options.samples = options.samples or (3 if options.quick else 15)
    return options


def protocol_of(options: argparse.Namespace) -> Protocol:
    """The full one or the quick one, with what the command line says."""
    protocol = replace(QUICK if options.quick else FULL, precision=options.precision)
    return replace(protocol, steps=options.steps) if options.steps else protocol


def new_record(protocol: Protocol, corpus: str) -> dict[str, Any]:
    """Where the numbers come from, and no numbers yet."""
    record = harness.environment_record()
    record["versions"]["flax"] = version("flax")
    return record | {
        "code": code_digest(),
        "protocol": asdict(protocol) | {"muon_share": MUON_SHARE},
        "corpus": corpus,
        "step_cost": None,
        "rows": [],
    }


def measure(options: argparse.Namespace, output: Path) -> dict[str, Any]:
    """The cost of a step, then every run that the file has not; all of it is saved."""
    protocol, corpus = protocol_of(options), load_corpus(options.data, options.glob)
    check(protocol, corpus)
    record = continued(output, new_record(protocol, corpus.digest))
    runs = list(runs_to_make(options, record["rows"]))
    programs = build(protocol)
    record["parameters"] = programs.parameters
    print(f"{programs.parameters / 1e6:.2f}M parameters, {len(runs)} runs to make")
    held_out = jax.device_put(held_out_batches(corpus, protocol))
    for seed, group in itertools.groupby(runs, key=lambda run: run[2]):
        _, (gen, order) = px.Generator(seed).split(2)
        weights = jax.device_get(programs.draw(gen))
        batches = jax.device_put(training_batches(order, corpus.train, protocol))
        if record["step_cost"] is None:
            calls = 2 if options.quick else 10
            record["step_cost"] = step_costs(
                programs, protocol, weights, batches, options.samples, calls
            )
            print(f"step: {record['step_cost']['median_ms']} ms")
        for run in group:
            row = train(programs, protocol, run, weights, batches, held_out)
            record["rows"].append(row)
            save(output, record)
            name, rate, _ = run
            print(f"{name:>6} {rate:8.1e} seed {seed}: {row['final']}", flush=True)
    return record


def main() -> None:
    options = parse()
    jax.config.update("jax_default_matmul_precision", options.precision)
    name = f"muon_training_{jax.devices()[0].platform}.json"
    output = options.output or harness.RESULTS / name
    try:
        record = measure(options, output)
    except UserError as error:
        sys.exit(f"bench_muon_training: error: {error}")
    save(output, record)
    report(record)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
