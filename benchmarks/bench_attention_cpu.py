"""flex_attention on a CPU: against jax.nn, against its own dense time, against torch.

    uv run --group bench benchmarks/bench_attention_cpu.py [--quick] [--output FILE]
        [--samples N] [--torch-python PATH | --without-torch]

Every duel is one workload (float32, batch 1, head dimension 64) and two entrants that
take turns, sample by sample. Block masks are made before the clock starts and are
arguments of the compiled function. The oracle is NumPy in float64 on the same arrays:
64 random query rows of every head for an output; every row of every gradient.

A turn counts when the cores share the cache that the machine says they share
(`core_distance`) before it and after it; turns that do not are kept apart and reported.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import core_distance, harness, torch_flex_cpu, torch_worker
from benchmarks.attention_entrants import TorchEntry, jax_nn, pliax, torch_entry
from benchmarks.attention_workloads import D, Workload, oracle


PAUSE_S = 0.02  # the idle threads of one entrant stop spinning before the other's turn
WAKE_S = 0.1  # after a pause the cores of a virtual machine are slow for some 50 ms
LEAST = 3  # turns that a median is taken of
PATIENCE = 4  # turns taken for each that is wanted, while cores are far apart


# --- duels ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Duel:
    """One workload, whom it is measured against, and how much faster it has to be.

    `against` is "jax.nn", "dense" (pliax without a mask) or "torch"; `bar` is the
    smallest median of ratios that passes, None where the row is for information.
    """

    against: str
    program: str
    S: int
    bar: float | None
    H: int = 8
    backward: bool = False

    @property
    def name(self) -> str:
        """Program, passes and length."""
        passes = " with backward" if self.backward else ""
        return f"{self.program}{passes}, S={self.S}"


def duels(*, quick: bool) -> list[Duel]:
    """All of them, or all of them at toy size."""
    if quick:
        short, H = (256, 512), 2
        own = [("causal", 256, 1.7, H), ("documents", 256, 10.0, H)]
        own += [("window", 512, 10.0, H)]
    else:
        short, H = (1024, 2048, 4096), 8
        own = [("causal", 2048, 1.7, H), ("causal", 8192, 1.7, H)]
        own += [("documents", 8192, 10.0, H), ("window", 16384, 10.0, H)]
    long = (256,) if quick else (2048, 4096, 8192)
    bars = dict.fromkeys(("causal", "documents", "alibi", "soft cap"), 1.0)
    return [
        *(Duel("jax.nn", "dense", S, 2.0, H) for S in short),
        *(Duel("jax.nn", "dense", S, 1.5, H, backward=True) for S in short),
        *(Duel("dense", program, S, bar, heads) for program, S, bar, heads in own),
        *(Duel("torch", p, S, b, H) for S in long for p, b in bars.items()),
        *(Duel("torch", "dense", S, None, H) for S in long),
    ]


@dataclass(frozen=True)
class Turn:
    """A sample of each entrant in ms, and the core distance around them in ns."""

    ours_ms: float
    theirs_ms: float
    distance_ns: float | None

    @property
    def counts(self) -> bool:
        """Whether the cores were as near as the machine says."""
        return self.distance_ns is None or self.distance_ns <= core_distance.NEAR_NS


def measure(
    duel: Duel, samples: int, worker: Any, distance: Callable[[], float] | None
) -> tuple[list[dict[str, Any]], list[Turn]]:
    """Both entrants in turn: a row of numbers for each, ours first, and the turns."""
    ours = Workload(duel.program, duel.S, duel.H, duel.backward)
    dense = Workload("dense", duel.S, duel.H)
    theirs = dense if duel.against == "dense" else ours
    entries: list[Any] = [harness.compile_rival(pliax(ours))]
    if duel.against == "torch":
        entries.append(torch_entry(worker, theirs))
    else:
        make = jax_nn if duel.against == "jax.nn" else pliax
        entries.append(harness.compile_rival(make(theirs)))
    errors = [
        harness.entry_errors(entry, oracle(workload))
        for entry, workload in zip(entries, (ours, theirs), strict=True)
    ]
    turns = _turns(entries, samples, distance)
    judged = judged_turns(turns)
    times = ([x.ours_ms for x in judged], [x.theirs_ms for x in judged])
    return [_row(duel, *x) for x in zip(entries, errors, times, strict=True)], turns


def _turns(
    entries: list[Any], samples: int, distance: Callable[[], float] | None
) -> list[Turn]:
    """Until `samples` of them count, or patience ends."""
    _turn(entries, distance)  # warms up
    turns: list[Turn] = []
    while sum(turn.counts for turn in turns) < samples:
        if len(turns) == PATIENCE * samples:
            break
        turns.append(_turn(entries, distance))
    return turns


def _turn(entries: list[Any], distance: Callable[[], float] | None) -> Turn:
    if distance is None:
        return Turn(*map(_sample, entries), distance_ns=None)
    before = distance()
    ours, theirs = map(_sample, entries)
    return Turn(ours, theirs, max(before, distance()))


def judged_turns(turns: list[Turn]) -> list[Turn]:
    """Those that count; all of them if that are fewer than three."""
    near = [turn for turn in turns if turn.counts]
    return near if len(near) >= LEAST else turns


def _sample(entry: Any) -> float:
    """Milliseconds of a call after others that keep the entrant busy for `WAKE_S`.

    A training loop does not sleep between its steps; the clock should not see it.
    """
    time.sleep(PAUSE_S)
    awake = time.perf_counter() + WAKE_S
    entry.sample()
    while time.perf_counter() < awake:
        entry.sample()
    return entry.sample()


def _row(duel: Duel, entry: Any, errors: Any, times: Any) -> dict[str, Any]:
    sizes = {"B": 1, "S": duel.S, "H": duel.H, "D": D}
    if isinstance(entry, TorchEntry):
        row = {
            "case": duel.name,
            **sizes,
            "rival": entry.rival.name,
            "median_ms": float(np.median(times)),
            "samples_ms": list(times),
            "max_error": errors[0],
            "mean_error": errors[1],
            "temporary_memory_mib": None,
            "compile_s": entry.compile_s,
        }
    else:
        case = harness.Case(duel.name, lambda: None, (), sizes)
        row = harness.table_row(case, entry, errors, times)
    return {**row, "min_ms": min(times), "against": duel.against}


def verdict(
    duel: Duel, rows: list[dict[str, Any]], turns: list[Turn]
) -> dict[str, Any]:
    """How many times faster, and whether that passes.

    The median over the turns: a slow phase of the machine slows both of a turn.
    """
    ours, theirs = rows
    ratio = _ratio(judged_turns(turns))
    far = [turn for turn in turns if not turn.counts]
    return {
        "case": duel.name,
        "against": duel.against,
        "ratio": ratio,
        "ratio_of_minima": theirs["min_ms"] / ours["min_ms"],
        "bar": duel.bar,
        "passed": None if duel.bar is None else ratio >= duel.bar,
        "near": len(turns) - len(far) >= LEAST,
        "far_turns": [dataclasses.asdict(turn) for turn in far],
        "far_ratio": _ratio(far) if far else None,
        "distances_ns": [turn.distance_ns for turn in turns],
    }


def _ratio(turns: list[Turn]) -> float:
    return float(np.median([turn.theirs_ms / turn.ours_ms for turn in turns]))


def memory(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How temporary memory grows with S, for us and jax.nn; linear is as S does."""
    rows = [row for row in rows if row["against"] == "jax.nn"]
    lengths = sorted({row["S"] for row in rows})
    verdicts = []
    for passes in ("dense", "dense with backward"):
        grown = {}
        for rival in ("pliax", "jax.nn"):
            small, large = (
                row["temporary_memory_mib"]
                for S in (lengths[0], lengths[-1])
                for row in rows
                if (row["case"], row["rival"]) == (f"{passes}, S={S}", rival)
            )
            grown[rival] = large / small
        bar = lengths[-1] / lengths[0]
        name = f"{passes}, S={lengths[0]} to {lengths[-1]}"
        verdicts.append(
            {"case": name, **grown, "bar": bar, "passed": grown["pliax"] <= bar}
        )
    return verdicts


# --- report ---------------------------------------------------------------------------


_MARKS = {True: "pass", False: "MISS", None: "-"}


_HEADING = (
    f"{'case':<28} {'against':<7} {'ours ms':>8} {'rival ms':>8} {'ratio':>6} "
    f"{'minima':>6} {'bar':>4}      {'far':>4} {'turns':>5} "
    f"{'error':>7} {'rival':>7} {'MiB':>6} {'rival':>6}"
)


def report(duel: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """One line: medians, ratios, how it is with far cores, errors, memory."""
    ours, theirs = rows
    far = "-" if duel["far_ratio"] is None else f"{duel['far_ratio']:.2f}"
    bar = "-" if duel["bar"] is None else f"{duel['bar']:.1f}"
    return (
        f"{duel['case']:<28} {duel['against']:<7} {ours['median_ms']:8.1f} "
        f"{theirs['median_ms']:8.1f} {duel['ratio']:6.2f} "
        f"{duel['ratio_of_minima']:6.2f} {bar:>4} {_MARKS[duel['passed']]:<4} "
        f"{far:>4} {len(duel['far_turns']):5} "
        f"{ours['max_error']:7.0e} {theirs['max_error']:7.0e} "
        f"{_mib(ours)} {_mib(theirs)}"
    )


def report_memory(growth: dict[str, Any]) -> str:
    return (
        f"temporary memory, {growth['case']}: {growth['pliax']:.1f} times, jax.nn "
        f"{growth['jax.nn']:.1f} times, bar {growth['bar']:.0f} times: "
        f"{_MARKS[growth['passed']]}"
    )


def _mib(row: dict[str, Any]) -> str:
    """Torch has no plan of its memory to read."""
    temporary = row["temporary_memory_mib"]
    return f"{'-':>6}" if temporary is None else f"{temporary:6.1f}"


# --- main -----------------------------------------------------------------------------


def main() -> None:
    options = _options()
    jax.config.update("jax_platforms", "cpu")
    environment = {**harness.environment_record(), "command": torch_worker.command()}
    samples = 3 if options.quick else options.samples
    distance = core_distance.probe()
    rows, verdicts, lines = [], [], []
    with torch_worker.running(options, torch_flex_cpu.__file__) as worker:
        torch = None if worker is None else worker.ask(do="versions")["torch"]
        environment["versions"]["torch"] = torch
        for duel in duels(quick=options.quick):
            if duel.against == "torch" and worker is None:
                continue
            pair, turns = measure(duel, samples, worker, distance)
            rows += pair
            verdicts.append(verdict(duel, pair, turns))
            lines.append(report(verdicts[-1], pair))
            print(lines[-1], flush=True)
    growth = memory(rows)
    print("", _HEADING, *lines, *map(report_memory, growth), sep="\n")
    record = {**environment, "duels": verdicts, "memory": growth, "rows": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {options.output}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, for a test")
    parser.add_argument("--samples", type=int, default=9)
    torch_worker.add_options(parser)
    parser.add_argument(
        "--output", type=Path, default=harness.RESULTS / "attention_cpu.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
