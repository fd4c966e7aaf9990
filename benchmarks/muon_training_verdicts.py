"""What the runs of `bench_muon_training.py` show: best learning rates, two claims.

Only seeds that every learning rate of both optimizers has are judged, so that a file
that was cut off compares like with like.
"""

import math
import statistics
from typing import Any


type Row = dict[str, Any]

COST_BAR = 1.05  # a Muon step over an AdamW step
OPTIMIZERS = ("adamw", "muon")


def verdicts(costs: dict[str, Any] | None, rows: list[Row]) -> dict[str, Any]:
    """Both claims as far as they can be judged, and the best rates."""
    finals = {name: final_losses(rows, name) for name in OPTIMIZERS}
    tried = [set(seeds) for found in finals.values() for seeds in found.values()]
    seeds = sorted(set.intersection(*tried)) if tried else []
    adamw, muon = found = [best(finals[name], seeds) for name in OPTIMIZERS]
    bars = []
    if costs:
        bars.append(_bar("a step of Muon over one of AdamW", costs["ratio"], COST_BAR))
    if adamw and muon:
        name = "final held-out loss, Muon's best rate against AdamW's"
        bars.append(_bar(name, muon["mean"], adamw["mean"]))
        pairs = zip(muon["finals"], adamw["finals"], strict=True)
        bars[-1]["by_seed"] = [a <= b for a, b in pairs]
    return {
        "bars": bars,
        "judged_seeds": seeds,
        "best": dict(zip(OPTIMIZERS, found, strict=True)),
    }


def final_losses(rows: list[Row], name: str) -> dict[float, dict[int, float | None]]:
    """Of each learning rate, by seed; None where the run diverged."""
    found: dict[float, dict[int, float | None]] = {}
    for row in sorted(rows, key=lambda row: (row["learning_rate"], row["seed"])):
        if row["optimizer"] == name:
            found.setdefault(row["learning_rate"], {})[row["seed"]] = row["final"]
    return found


def best(
    finals: dict[float, dict[int, float | None]], seeds: list[int]
) -> dict[str, Any] | None:
    """The rate of the least mean final loss, of those that diverged for no seed."""
    means = {
        rate: statistics.mean(values)
        for rate, by_seed in finals.items()
        if (values := [x for s in seeds if (x := by_seed[s]) is not None])
        and len(values) == len(seeds)
    }
    if not means:
        return None
    rate = min(means, key=means.__getitem__)
    return {
        "learning_rate": rate,
        "mean": means[rate],
        "finals": [finals[rate][seed] for seed in seeds],
        "at_the_edge": rate in (min(finals), max(finals)),
        "rates_tried": len(finals),
    }


def _bar(name: str, value: float, bar: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bar": bar, "passed": value <= bar}


def report(record: dict[str, Any]) -> None:
    """Mean final losses by learning rate, best rates, PASS or MISS."""
    for name in OPTIMIZERS:
        for rate, finals in final_losses(record["rows"], name).items():
            values = [math.nan if x is None else x for x in finals.values()]
            seeds = " ".join(f"{x:.4f}" for x in values)
            print(f"{name:>6} {rate:8.1e}  {statistics.mean(values):.4f}  ({seeds})")
    for name, found in record["best"].items():
        if found:
            edge = ", AT THE EDGE of its rates" if found["at_the_edge"] else ""
            print(f"best {name}: {found['learning_rate']:.1e}{edge}")
    for bar in record["bars"]:
        verdict = "PASS" if bar["passed"] else "MISS"
        seeds = f", by seed {bar['by_seed']}" if "by_seed" in bar else ""
        value, limit = bar["value"], bar["bar"]
        print(f"{verdict}  {bar['name']}: {value:.4f} (<= {limit:.4f}){seeds}")
