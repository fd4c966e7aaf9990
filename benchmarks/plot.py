"""Draw docs/assets/bench_*.png from the committed benchmarks/results/*.json.

uv run --group bench benchmarks/plot.py [muon] [muon_training_gpu] [attention] ...
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "assets"
COLOURS = ("#2f6f9f", "#d98032", "#9a9a9a")  # ours first


def main(results: Path = RESULTS, pictures: Path = PICTURES) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="all if left out")
    pictures.mkdir(parents=True, exist_ok=True)
    found = {
        name: results / f"{name if name.endswith('_gpu') else f'{name}_cpu'}.json"
        for name in FIGURES
    }
    for name in parser.parse_args().names or [x for x in found if found[x].exists()]:
        draw(name, found[name], pictures / f"bench_{name}.png")


def draw(name: str, result: Path, picture: Path) -> None:
    """Save the figure of one benchmark; its ground is white on any page."""
    figure = FIGURES[name](json.loads(result.read_text()))
    figure.savefig(picture, dpi=150, facecolor="white", metadata={"Software": ""})
    plt.close(figure)
    print(f"wrote {picture}")


# --- Muon -----------------------------------------------------------------------------


def muon(record: dict[str, Any]) -> Any:
    cases = list(dict.fromkeys(row["case"] for row in record["rows"]))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(4.2 * len(cases), 2.8), squeeze=False
    )
    for axis, case in zip(axes[0], cases, strict=True):
        _bars(axis, case, [row for row in record["rows"] if row["case"] == case])
    figure.suptitle("One Muon update, 12 layers, CPU: median and samples", fontsize=10)
    figure.tight_layout()
    return figure


def _bars(axis: Any, case: str, rows: list[dict[str, Any]]) -> None:
    """One bar a rival, its samples as dots, its error written beside it."""
    heights = np.arange(len(rows))[::-1]
    medians = [row["median_ms"] for row in rows]
    colours = [COLOURS[not row["rival"].startswith("pliax")] for row in rows]
    axis.barh(heights, medians, color=colours, height=0.6)
    for height, row in zip(heights, rows, strict=True):
        samples = row["samples_ms"]
        axis.plot(samples, [height] * len(samples), "k.", markersize=2, alpha=0.5)
        label = f" {row['median_ms']:.0f} ms, error {row['max_error']:.0e}"
        axis.text(0, height + 0.33, label, fontsize=7, va="bottom")
    axis.set_yticks(heights, [row["rival"].replace(", ", ",\n") for row in rows])
    axis.set_ylim(-0.5, len(rows) - 0.3)
    axis.set_title(case, fontsize=9)
    axis.set_xlabel("milliseconds", fontsize=8)
    axis.locator_params(axis="x", nbins=5)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def muon_training(record: dict[str, Any]) -> Any:
    """Held-out loss over the steps at the best rates, and at the end over the rates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    rows = [row for row in record["rows"] if row["seed"] in record["judged_seeds"]]
    for name, colour in (("muon", COLOURS[0]), ("adamw", COLOURS[1])):
        mine = [row for row in rows if row["optimizer"] == name]
        if found := record["best"][name]:
            rate, last = found["learning_rate"], f"{found['mean']:.3f}"
            curves = [x["curve"] for x in mine if x["learning_rate"] == rate]
            steps, losses = np.moveaxis(np.array(curves), -1, 0)
            label = f"{name}, learning rate {rate:g}: {last}"
            left.plot(steps[0], losses.mean(0), color=colour, label=label)
            band = losses.min(0), losses.max(0)
            left.fill_between(steps[0], *band, color=colour, alpha=0.3)
            left.axhline(found["mean"], color=colour, linewidth=0.6, linestyle=":")
        ends = [(x["learning_rate"], x["final"]) for x in mine if not x["diverged"]]
        rates = sorted({rate for rate, _ in ends})
        means = [np.mean([x for other, x in ends if other == rate]) for rate in rates]
        right.semilogx(rates, means, color=colour, label=name)
        right.plot(*np.reshape(ends, (-1, 2)).T, ".", color=colour, markersize=4)
    count = len(record["judged_seeds"])
    left.set_title(f"held-out nats a byte: mean and range of {count} seeds", fontsize=9)
    left.set_xlabel("step", fontsize=8)
    right.set_title("at the end of each run, by peak learning rate", fontsize=9)
    rates = sorted({row["learning_rate"] for row in rows})
    right.minorticks_off()
    right.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=60)
    for axis in (left, right):
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


# --- attention ------------------------------------------------------------------------


_TITLES = {
    "jax.nn": "jax.nn.dot_product_attention",
    "dense": "pliax without a mask",
    "torch": "torch.compile(flex_attention)",
}


def attention(record: dict[str, Any]) -> Any:
    """How many times faster, by rival, and the memory of the dense case."""
    pairs = zip(record["rows"][::2], record["rows"][1::2], strict=True)
    duels = list(zip(record["duels"], pairs, strict=True))
    figure = plt.figure(figsize=(11, 7), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(6, 5, 4))
    panels = {"jax.nn": grid[0, 0], "dense": grid[1, 0], "torch": grid[:, 1]}
    for against, place in panels.items():
        found = [duel for duel in duels if duel[0]["against"] == against]
        if found:
            _ratios(figure.add_subplot(place), _TITLES[against], found)
    _memory(figure.add_subplot(grid[2, 0]), record["rows"])
    figure.suptitle(
        "flex_attention on a CPU, float32, D = 64: how many times faster\n"
        "bars: median of the turns; dots: each turn; orange: the least that passes; "
        "above: time of pliax, of its rival (largest error)",
        fontsize=9,
    )
    return figure


def _ratios(axis: Any, title: str, duels: list[Any]) -> None:
    """One bar a duel, both times and errors written in it."""
    for height, (duel, (ours, theirs)) in enumerate(reversed(duels)):
        colour = COLOURS[2 if duel["passed"] is None else 0]
        axis.barh(height, duel["ratio"], color=colour, height=0.45, alpha=0.55)
        turns = np.divide(theirs["samples_ms"], ours["samples_ms"])
        axis.plot(turns, [height] * len(turns), "k.", markersize=2, alpha=0.6)
        if duel["bar"] is not None:
            ends = (height - 0.3, height + 0.23)
            axis.vlines(duel["bar"], *ends, color=COLOURS[1], linewidth=2)
        times = ", ".join(
            f"{_milliseconds(row['median_ms'])} ({row['max_error']:.0e})"
            for row in (ours, theirs)
        )
        axis.text(0, height + 0.25, f" {times}", fontsize=6, va="bottom")
    axis.set_yticks(range(len(duels)), [duel["case"] for duel, _ in reversed(duels)])
    axis.set_ylim(-0.5, len(duels) - 0.3)
    axis.set_xlim(left=0)
    axis.set_title(f"against {title}", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _milliseconds(time: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{time:.0f} ms" if time >= 100 else f"{time:.3g} ms"


def _memory(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Temporary memory of the dense case over the length."""
    rows = [row for row in rows if row["against"] == "jax.nn"]
    for colour, rival in zip(COLOURS, ("pliax", "jax.nn"), strict=False):
        for passes, line in (("dense", "o-"), ("dense with backward", "s--")):
            found = [
                (row["S"], row["temporary_memory_mib"])
                for row in rows
                if row["rival"] == rival and row["case"].startswith(f"{passes},")
            ]
            label = f"{rival}, {passes}"
            axis.loglog(*zip(*found, strict=True), line, color=colour, label=label)
    lengths = sorted({row["S"] for row in rows})
    axis.set_xticks(lengths, [str(S) for S in lengths])
    axis.minorticks_off()
    axis.set_xlabel("S", fontsize=8)
    axis.set_title("Temporary memory, MiB", fontsize=9)
    axis.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


# --- attention on a GPU ---------------------------------------------------------------

# From above, in whatever order parts of a file were measured.
GPU_PROGRAMS = ("dense", "causal", "alibi", "soft cap", "window", "documents")
GPU_PROGRAMS += ("prefix", "table")


def attention_gpu(record: dict[str, Any]) -> Any:
    """Rates by program: a panel for each length, direction and number of channels."""
    rows = record["rows"]
    lengths = sorted({row["S"] for row in rows})
    channels = sorted({row["D"] for row in rows})
    panels = [(D, x) for D in channels for x in ("forward", "backward")]
    size = (len(lengths), len(panels))
    figure, axes = plt.subplots(
        *size, figsize=(11, 4.2 * len(lengths)), layout="constrained", squeeze=False
    )
    for line, S in zip(axes, lengths, strict=True):
        for axis, (D, direction) in zip(line, panels, strict=True):
            wanted = {"S": S, "D": D, "direction": direction}
            here = [row for row in rows if wanted.items() <= row.items()]
            _rates(axis, here, record["bars"])
            axis.set_title(f"{direction}, D = {D}, S = {S}", fontsize=9)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, names, fontsize=7, frameon=False, ncols=4, loc="outside lower center"
    )
    device = record["device"]["kind"]
    figure.suptitle(
        f"flex_attention on one {device}, bfloat16: TFLOP/s of unmasked scores\n"
        "bars: medians; dots: samples; orange: the least that passes; in white: "
        "largest mean error over that of the plain formula",
        fontsize=9,
    )
    return figure


def _rates(axis: Any, rows: list[dict[str, Any]], bars: list[dict[str, Any]]) -> None:
    """A bar for each rival of a program, and the rates that would meet every aim."""
    rivals = {"pliax": COLOURS[0], "torch flex": COLOURS[2]}
    rivals |= {"torch flex autotuned": "#5f5f5f", "cuDNN": "#d0d0d0"}
    rows = [row for row in rows if row["rival"] in rivals]
    present = [x for x in rivals if x in {row["rival"] for row in rows}]
    step = 0.84 / len(present)
    there = {row["program"] for row in rows}
    programs = [x for x in GPU_PROGRAMS if x in there][::-1]
    named = set()
    for row in rows:
        place = present.index(row["rival"])
        height = programs.index(row["program"]) + 0.42 - step * (place + 0.5)
        label = row["rival"] if row["rival"] not in named else None
        named.add(row["rival"])
        colour = rivals[row["rival"]]
        axis.barh(height, row["tflops"], color=colour, height=step - 0.02, label=label)
        samples = row["tflops"] * row["median_ms"] / np.array(row["samples_ms"])
        axis.plot(samples, [height] * len(samples), "k.", markersize=1.5, alpha=0.5)
        if place:
            continue
        error = f" {max(row['over_plain']):.2f}"
        axis.text(0, height, error, fontsize=6, va="center", color="white")
        prefix = f"{row['program']} S={row['S']} D={row['D']} {row['direction']} "
        names = {prefix + x for x in ("torch flex", "cuDNN")}
        aims = [x["bar"] / x["ratio"] for x in bars if x["name"] in names]
        if aims:
            least = row["tflops"] * max(aims)
            axis.vlines(least, height - 0.15, height + 0.15, color=COLOURS[1])
    axis.set_yticks(range(len(programs)), programs)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


# --- changing shapes ------------------------------------------------------------------


def compile(record: dict[str, Any]) -> Any:
    """The seconds of a run as its steps go by, and how far its losses drift."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    training = record["training"]
    colours = {"pliax": COLOURS[0], "jax.jit": COLOURS[1], "by hand": COLOURS[2]}
    for name, row in training["rows"].items():
        seconds = np.cumsum(row["steps_ms"]) / 1e3
        count, end = row["compilations"], f"{seconds[-1]:.0f} s"
        label = f"{name}: {end}, {count} compilation{'s'[: count != 1]}"
        left.plot(seconds, color=colours.get(name, "black"), label=label, linewidth=1.2)
    left.set_title("seconds since the start, compilations included", fontsize=9)
    runs = {name: np.array(training["rows"][name]["losses"]) for name in colours}
    for name in ("by hand", "pliax"):
        drift = np.abs(runs[name] / runs["jax.jit"] - 1)
        label = f"{name}, each run from its own last step"
        right.semilogy(drift, ".", color=colours[name], markersize=2, label=label)
    same = "pliax, from the same state"
    right.semilogy(training["loss_errors"], "k.", markersize=2, label=same)
    right.axhline(1e-5, color="black", linewidth=0.6, linestyle=":")
    right.set_title("relative difference of the loss from jax.jit's", fontsize=9)
    for axis in (left, right):
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7, frameon=False, markerscale=4)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


FIGURES = {
    "muon": muon,
    "muon_training_gpu": muon_training,
    "attention": attention,
    "attention_gpu": attention_gpu,
    "compile": compile,
}


if __name__ == "__main__":
    main()
