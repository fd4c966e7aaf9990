"""The figure of attention on a GPU shows what its record holds."""

import json

import matplotlib.pyplot as plt
import numpy as np

from benchmarks import harness, plot


def test_every_row_is_a_bar_as_long_as_its_rate():
    record = json.loads((harness.RESULTS / "attention_gpu.json").read_text())
    figure = plot.attention_gpu(record)
    found = [bar.get_width() for axis in figure.axes for bar in axis.patches]
    rivals = ("pliax", "torch flex", "torch flex autotuned", "cuDNN")
    wanted = [row["tflops"] for row in record["rows"] if row["rival"] in rivals]
    np.testing.assert_allclose(sorted(found), sorted(wanted))
    plt.close(figure)
