"""Training with both optimizers: what is recorded, continued, refused, concluded, drawn."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

import pliax as px
from benchmarks import (
    bench_muon_training as bench,
    harness,
    muon_training_workload as workload,
    plot,
)
from benchmarks.muon_training_verdicts import verdicts


def call(output, *more):
    script = str(harness.ROOT / "benchmarks" / "bench_muon_training.py")
    command = [sys.executable, script, "--quick", "--output", str(output), *more]
    subprocess.run(command, check=True, capture_output=True, cwd=harness.ROOT)
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Files of short lines, enough for an epoch of the quick protocol."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for number in range(60):
        lines = rng.choice(["alpha beta\n", "gamma = 1\n\n", "delta epsilon\n"], 40)
        (folder / f"{number}.txt").write_text("".join(lines))
    return ["--data", str(folder), "--glob", "*.txt"]


@pytest.fixture(scope="module")
def corpus(texts):
    return workload.load_corpus(Path(texts[1]), "*.txt")


def test_a_quick_run_is_judged_and_continued(tmp_path, texts):
    output = tmp_path / "quick.json"
    before = call(output, *texts)
    assert len(before["rows"]) == 4
    for row in before["rows"]:
        points = [2, 4, 6, 8] if row["optimizer"] == "adamw" else [2, 4, 6]
        assert [step for step, _ in row["curve"]] == points
        assert len(row["seconds"]) == len(row["training_losses"]) == len(points)
        assert row["final"] == row["curve"][-1][1] < row["training_losses"][0]
    cost = before["step_cost"]
    assert {len(found) for found in cost["samples_ms"].values()} == {3}
    losses = cost["losses"]
    np.testing.assert_allclose(losses["muon"], losses["adamw"], rtol=1e-6)
    assert len(before["bars"]) == 2 and before["judged_seeds"] == [0]
    after = call(output, *texts, "--muon-rates", "1e-3", "3e-3")
    assert after["rows"][:4] == before["rows"] and len(after["rows"]) == 5
    assert after["step_cost"] == cost


def test_a_file_of_another_kind_is_not_continued(tmp_path):
    record = bench.new_record(workload.QUICK, "corpus")
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record | {"rows": [{"seed": 7}]}))
    assert bench.continued(file, record)["rows"] == [{"seed": 7}]
    other = bench.new_record(replace(workload.QUICK, steps=4), "corpus")
    with pytest.raises(workload.UserError, match="with another protocol; name another"):
        bench.continued(file, other)


def test_more_than_an_epoch_is_refused(corpus):
    size = sum(len(document.data) for document in corpus.train)
    most = size // (workload.QUICK.rows * workload.QUICK.length) // 4 * 4
    workload.check(replace(workload.QUICK, steps=most), corpus)
    with pytest.raises(workload.UserError, match=f"one epoch .* give --steps {most} "):
        workload.check(replace(workload.QUICK, steps=most + 4), corpus)
    with pytest.raises(workload.UserError, match="must be a multiple of 4"):
        workload.check(replace(workload.QUICK, steps=6), corpus)


def test_a_seed_sees_every_byte_at_most_once(corpus):
    protocol, gen = replace(workload.QUICK, steps=400), px.Generator(0)
    batches = workload.training_batches(gen, corpus.train, protocol)
    assert {x.shape[1:] for x in batches.values()} == {(4, 64)}
    seen, scored = batches["targets"], batches["scored"] == 1
    texts = np.concatenate([document.data for document in corpus.train])
    counts = [np.bincount(x, minlength=256) for x in (seen[scored], texts)]
    assert (counts[0] == counts[1]).all()  # all rows of the corpus are in 400 batches


def test_the_schedule_rises_and_falls_over_a_run(standard_promotion):
    schedule = workload.warmup_cosine(2.0, 40, 0.1)
    rates = np.array([schedule(jax.numpy.int32(count)) for count in range(40)])
    np.testing.assert_allclose(rates[:5], [0.5, 1, 1.5, 2, 2])
    assert (np.diff(rates[4:]) < 0).all() and 0 < rates[-1] < 0.01


def made(name, rate, seed, final):
    curve = [] if final is None else [[1, 5.0], [2, final]]
    row = {"optimizer": name, "learning_rate": rate, "seed": seed, "final": final}
    return row | {"curve": curve, "diverged": final is None}


ROWS = [
    *(made("adamw", rate, seed, 2 + rate) for rate in (0.1, 0.2) for seed in (0, 1)),
    *(made("muon", 0.1, seed, 1.9 + seed / 2) for seed in (0, 1)),
    *(made("muon", 0.2, seed, None if seed else 1.0) for seed in (0, 1)),
]


def test_the_best_rate_has_the_least_mean_and_diverged_for_no_seed():
    found = verdicts({"ratio": 1.1}, [*ROWS, made("muon", 0.1, 2, 0.0)])
    assert found["judged_seeds"] == [0, 1]
    assert found["best"]["muon"]["finals"] == [1.9, 2.4]
    cost, loss = found["bars"]
    assert not cost["passed"] and not loss["passed"]
    assert loss["by_seed"] == [True, False]


def test_the_figure_shows_the_best_curves_and_every_end():
    figure = plot.muon_training({"rows": ROWS, **verdicts(None, ROWS)})
    left, right = figure.axes
    ends = [line.get_ydata()[-1] for line in left.lines if len(line.get_xdata()) == 2]
    assert {2.15, 2.1} <= {round(float(x), 6) for x in ends}
    shown = sum(len(x.get_xdata()) for x in right.lines if x.get_marker() == ".")
    assert shown == sum(not row["diverged"] for row in ROWS)
    plt.close(figure)
