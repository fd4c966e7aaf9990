"""The benchmark of learned biases: what it computes, and what it writes."""

import json
import sys

import numpy as np
import pytest

from benchmarks import bench_attention_learned as bench


def test_buckets_are_those_of_the_mods_of_the_library():
    distances = np.arange(-5, 300)
    found = bench.bucket(np, distances)
    assert found[:5].tolist() == [0] * 5 and found[5:21].tolist() == list(range(16))
    assert (np.diff(found) >= 0).all() and found[-1] == bench.BUCKETS - 1
    assert found[5 + bench.DISTANCE] == bench.BUCKETS - 1


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("program", bench.PROGRAMS)
def test_a_quick_run_has_smaller_errors_than_the_formula(
    program, tmp_path, monkeypatch
):
    output = tmp_path / "record.json"
    words = ["--programs", program, "--channels", "64", "--samples", "1"]
    argv = ["bench", "--quick", *words, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    bench.main()
    errors = {}
    for row in json.loads(output.read_text())["rows"]:
        errors[row["case"], row["rival"]] = row["mean_error"]
        assert row["median_ms"] > 0
    for name in (program, f"{program}, not learned"):
        assert errors[name, "pliax"] < 1.1 * errors[name, "formula"]
