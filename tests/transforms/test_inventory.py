"""The padding transform on an inventory of JAX's public functions, written before it.

Each program is traced once for all sizes and run in a bucket, at several sizes, with two
kinds of poison in the padding. Its valid results are the same bits with either, and
those of plain JAX. What is not padded is refused, never wrong and never a crash.
"""

import os

import pytest
from transforms.padding.outcomes import MISTAKES, examine, is_padded
from transforms.programs import inventory
from transforms.programs.subjects import subject_of


THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
PROGRAMS = inventory() if THOROUGH else inventory()[::9]
SAMPLE = [
    pytest.param(p, id=p.name, marks=[pytest.mark.slow] if i % 3 else [])
    for i, p in enumerate(PROGRAMS)
]


@pytest.mark.slow
@pytest.mark.parametrize("program", SAMPLE)
def test_padded_programs_equal_plain_ones_whatever_the_padding(program):
    outcome = examine(subject_of(program))
    assert outcome.kind not in MISTAKES, outcome


@pytest.mark.slow
def test_at_least_three_quarters_of_the_inventory_are_padded():
    padded = [is_padded(subject_of(program)) for program in PROGRAMS]
    assert sum(padded) >= 0.75 * len(padded)
