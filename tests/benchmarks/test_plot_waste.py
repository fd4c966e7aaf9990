"""The plot of waste shows what px.compile's own functions compute."""

import matplotlib.pyplot as plt
import pytest

from benchmarks import plot_waste


@pytest.fixture(scope="module")
def curves():
    return plot_waste.curves(plot_waste.lengths())


def test_placed_buckets_never_waste_more_and_more_buckets_never_hurt(curves):
    placed, geometric = (curves[n] for n in ("placed by the histogram", "geometric"))
    for (count, waste), (other_count, other) in zip(placed, geometric, strict=True):
        assert count <= other_count and waste <= other
    wastes = [waste for _, waste in placed]
    assert wastes == sorted(wastes, reverse=True)


def test_the_figure_shows_the_curves(curves):
    figure = plot_waste.draw(plot_waste.lengths())
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    for name, points in curves.items():
        assert list(zip(*lines[name].get_data(), strict=True)) == points
    plt.close(figure)
