"""What a run shows: a progress bar, metrics.jsonl, and loss.png."""

import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any, Self

from rich.progress import BarColumn, Progress, TextColumn

from .errors import UserError


class Metrics:
    """One JSON object a line; a resumed run continues where its checkpoint stands."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        """Keep the training steps up to `resumed_at`, drop what came after."""
        self.path = path
        self.rows = [
            row
            for row in (_read(path) if resumed_at else [])
            if row["step"] <= resumed_at and "loss" in row
        ]
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        fresh.replace(path)

    def add(self, **row: Any) -> None:
        """Append one line and flush it."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric."""
        rows = [row for row in self.rows if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]


def _read(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a killed process may have left half of one at the end."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return [dict(row, step=int(row["step"])) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged; remove it and --resume again") from error


class StepBar:
    """Step, loss, tokens/s, compilations so far, median time of the last 50 steps."""

    def __init__(self, start: int, steps: int) -> None:
        """A bar from `start` to `steps`."""
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=10),
            TextColumn("{task.description}"),
        )
        self._task = self._progress.add_task("", total=steps, completed=start)
        self._seconds: deque[float] = deque(maxlen=50)
        self._tokens: deque[int] = deque(maxlen=50)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def advance(self, loss: float, tokens: int, seconds: float, compiled: int) -> None:
        """Show one more step."""
        self._seconds.append(seconds)
        self._tokens.append(tokens)
        rate = sum(self._tokens) / sum(self._seconds)
        median = 1e3 * statistics.median(self._seconds)
        text = (
            f"loss {loss:.3f}  {rate:,.0f} tokens/s  {compiled} compilations"
            f"  median {median:.0f} ms"
        )
        self._progress.update(self._task, advance=1, description=text)


def plot_losses(metrics: Metrics, lines: dict[str, float], path: Path) -> None:
    """Training and validation loss, with the baselines as horizontal lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    steps, losses = metrics.series("loss")
    axes.plot(steps, losses, color="#9db7d5", linewidth=1, label="train")
    validation = metrics.series("val_loss")
    style = {"color": "#1f4e8c", "linewidth": 2, "marker": "o", "markersize": 4}
    axes.plot(*validation, **style, label="validation")
    for name, value in lines.items():
        axes.axhline(value, color="#999999", linewidth=0.8, linestyle="--")
        axes.annotate(
            f" {name} {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            va="center",
            color="#666666",
            fontsize=8,
        )
    low = min(*lines.values(), *losses, *validation[1])
    high = max(*lines.values(), *losses[len(losses) // 20 :])
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", framealpha=1.0, edgecolor="white")
    figure.savefig(path)
    plt.close(figure)
