"""The benchmark of decoding: what it counts, what it writes, what it concludes."""

import json
import sys

import pytest

from benchmarks import bench_attention_decoding as bench


def test_a_call_reads_keys_and_values_once():
    case = bench.Case("none", T=1, B=8)
    assert case.bytes == 2 * (8 * 131072 * 2 * 128) * 2  # both, of bfloat16


def test_a_verdict_is_the_share_of_the_copy():
    row = {"program": "lengths", "T": 1, "B": 8}
    rivals = {"pliax": 0.9, "pliax xla": 0.2, "torch flex": 0.8}
    rows = [{**row, "rival": name, "of_copy": x} for name, x in rivals.items()]
    (found,) = bench.verdicts(rows)
    assert found == {
        "name": "lengths T=1 B=8",
        "share": 0.9,
        "bar": 0.8,
        "passed": True,
    }


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("program", ["none", "pages, ALiBi"])
def test_a_quick_run_has_an_error_beside_each_time(program, tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    sizes = ["--programs", program, "--queries", "2", "--batches", "2"]
    argv = ["bench", "--quick", *sizes, "--samples", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    bench.main()
    record = json.loads(output.read_text())
    (row,) = record["rows"]
    assert row["rival"] == "pliax xla" and row["over_plain"] < 1.1
    assert (
        row["median_ms"] > 0 and record["copy_gb_per_s"] and record["versions"]["jax"]
    )
