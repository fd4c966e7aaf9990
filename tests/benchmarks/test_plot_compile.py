"""The figure of changing shapes shows what its record holds."""

import json

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import harness, plot


def test_curves_end_at_the_seconds_of_the_runs_and_show_every_difference():
    record = json.loads((harness.RESULTS / "compile_cpu.json").read_text())
    figure = plot.compile(record)
    left, right = figure.axes
    rows = record["training"]["rows"]
    ends = [line.get_ydata()[-1] for line in left.lines]
    np.testing.assert_allclose(ends, [row["seconds"] for row in rows.values()])
    same = next(x for x in right.lines if "same state" in x.get_label())
    assert list(same.get_ydata()) == record["training"]["loss_errors"]
    plt.close(figure)
