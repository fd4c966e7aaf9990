"""The benchmark of decoding: what it counts, what it writes, what it concludes."""

import json
import sys

import pytest

from benchmarks import bench_attention_decoding as bench


def test_a_call_reads_keys_and_values_once():
    case = bench.Case("none", T=1, B=8)
    assert case.bytes == 2 * (8 * 131072 * 2 * 128) * 2  # both, of bfloat16


def test_a_verdict_is_the_share_of_the_copy():
    row = {"program": "lengths", "T": 1, "B": 8, "S": 131072}
    rivals = {"pliax": 0.9, "pliax xla": 0.2, "torch flex": 0.8}
    rows = [{**row, "rival": name, "of_copy": x} for name, x in rivals.items()]
    shorter = {**rows[0], "S": 4096}  # for which there is no bar
    (found,) = bench.verdicts([*rows, shorter])
    assert found == {
        "name": "lengths T=1 B=8",
        "share": 0.9,
        "bar": 0.8,
        "passed": True,
    }


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("S", [128, 4096, 16384, 131072])
def test_what_takes_turns_is_not_in_the_cache_where_few_calls_can_be_larger(S, B):
    case = bench.Case("none", T=1, B=B, S=S)
    stores = bench.stores_of(case)
    is_large = stores * case.bytes >= bench.AT_LEAST
    assert 1 <= stores <= 16 and (is_large or stores == 16)


def run(monkeypatch, output, *words):
    argv = ["bench", "--quick", *words, "--samples", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    bench.main()
    return json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("program", ["none", "pages, ALiBi"])
def test_a_quick_run_has_an_error_beside_each_time(program, tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    sizes = ["--programs", program, "--queries", "2", "--batches", "2"]
    record = run(monkeypatch, output, *sizes)
    (row,) = record["rows"]
    assert row["S"] == 512
    assert row["rival"] == "pliax xla" and row["over_plain"] < 1.1
    assert (
        row["median_ms"] > 0 and record["copy_gb_per_s"] and record["versions"]["jax"]
    )


@pytest.mark.usefixtures("standard_promotion")
def test_caches_of_several_lengths_are_measured_in_one_run(tmp_path, monkeypatch):
    sizes = ["--programs", "lengths", "--queries", "2", "--batches", "1"]
    record = run(monkeypatch, tmp_path / "x.json", *sizes, "--keys", "128", "256")
    assert [row["S"] for row in record["rows"]] == [128, 256]
    assert all(row["over_plain"] < 1.1 for row in record["rows"])
    assert record["bars"] == []


@pytest.mark.parametrize("keys", ["100", "0", "-128"])
def test_a_cache_is_made_of_whole_pages(keys, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "x.json", "--keys", keys)
    assert "--keys must be multiples of 128" in capsys.readouterr().err
