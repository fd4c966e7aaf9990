import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import bench_compile as bench, harness
from benchmarks.compile_workloads import Sizes, documents, training


def record(tmp_path, *rows):
    output = tmp_path / "quick.json"
    script = harness.ROOT / "benchmarks" / "bench_compile.py"
    options = ["--quick", "--without-torch", "--output", str(output), "--rows", *rows]
    command = [sys.executable, str(script), *options]
    subprocess.run(command, check=True, capture_output=True, cwd=harness.ROOT)
    return json.loads(output.read_text())


def test_quick_parts_have_samples_and_verdicts(tmp_path):
    found = record(tmp_path, "specialisation", "dispatch")
    assert found["specialisation"]["max_error"] < 1e-5
    rows, bars = found["dispatch"]["rows"], found["dispatch"]["bars"]
    calls = [row for row in rows if "leaves" in row]  # and once more, specialised
    assert len(bars) == len(rows) + len(calls)
    for part in ("specialisation", "dispatch"):
        for line in found[part]["bars"]:
            assert isinstance(line["passed"], bool)


@pytest.mark.slow
def test_the_training_run_is_exact(tmp_path):
    found = record(tmp_path, "training")["training"]
    assert max(found["loss_errors"]) < 1e-5
    assert set(found["rows"]) == {"pliax", "jax.jit", "by hand"}
    for row in found["rows"].values():
        assert len(row["steps_ms"]) == len(found["lengths"])


def test_a_bar_may_be_a_least_or_a_most(capsys):
    assert bench.bar("x", 2.0, 1.0, least=True)["passed"]
    assert not bench.bar("x", 2.0, 1.0)["passed"]
    assert "MISS  x: 2 (<= 1)" in capsys.readouterr().out


def test_padding_by_hand_is_the_same_step(standard_promotion):
    work = training(Sizes(layers=1, width=16, heads=2))
    ((tokens, targets),) = documents([9], 2)
    exact, by_hand = work.step, bench.ByHand(work, bench.power_of_two)
    (_, wanted), (_, found) = (
        step(work.state, tokens, targets) for step in (exact, by_hand)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
