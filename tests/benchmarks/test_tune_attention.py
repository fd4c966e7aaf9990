"""The tuner of attention's block sizes: what it tries, and what it writes."""

import json
import sys

import pytest

from benchmarks import tune_attention as tune
from benchmarks.bench_attention_gpu import Case
from pliax.kernels.attention.configs import Kernel


@pytest.mark.slow
@pytest.mark.parametrize("direction", tune.PARTS)
@pytest.mark.parametrize("program", ["dense", "documents", "alibi"])
def test_candidates_are_different_and_one_is_the_tables(program, direction):
    case = Case(program, S=4096, D=128, B=1)
    table, *others = tune.candidates(case, direction, 128)
    blocks = (128, 128) if case.mods(tune.jnp)[1] else None
    configs = [
        tuple(
            Kernel(name, (128, 128), blocks).config(x.options)
            for name in tune.kernels(case, direction, 128)
        )
        for x in others
    ]
    assert not table.options and len(set(configs)) == len(configs) > 3
    assert any(
        config == Kernel(name, (128, 128), blocks).config({})
        for found in configs
        for name, config in zip(tune.kernels(case, direction, 128), found, strict=True)
    )


@pytest.mark.parametrize("D", [64, 128])
def test_the_kernels_tuned_are_those_that_run(D):
    """Of sparse masks of whole blocks one for each side, else one for all gradients."""
    split, fused = ["dq", "dkv"], ["backward"]
    for program, size, wanted in [
        ("documents", 128, split), ("documents", 64, fused), ("alibi", 128, fused),
    ]:  # fmt: skip
        assert tune.kernels(Case(program, S=4096, D=D, B=1), "backward", size) == wanted


@pytest.mark.usefixtures("standard_promotion")
def test_a_quick_run_ranks_what_is_right(tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    given = ["--programs", "documents", "--lengths", "128", "--channels", "64"]
    given += ["--directions", "forward", "--samples", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["tune", "--quick", *given])
    tune.main()
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 2
    assert rows[0]["median_ms"] <= rows[1]["median_ms"]
    assert all(max(row["over_plain"]) < tune.BAR for row in rows)
