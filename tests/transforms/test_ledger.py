"""Laws of the counts of calls."""

import numpy as np
import pytest

from pliax.transforms._ledger import Calls


def test_calls_are_timed_ever_less_often_and_stand_for_all():
    calls, timed = Calls(valid=3, held=4), []
    for number in range(5000):
        if not calls.short & calls.untimed:
            timed.append(number)
            calls.timed_one(1e-3)
        calls.short += 1
    assert timed[:5] == [0, 2, 4, 8, 16]
    assert np.diff(timed).max() == 1024
    read = calls.read()
    assert read["call_seconds"] == pytest.approx(5.0)
    assert (read["calls"], read["valid"], read["held"]) == (5000, 15000, 20000)


def test_a_slow_first_call_stands_for_few():
    calls = Calls(valid=1, held=1)
    for number in range(3000):
        if not calls.short & calls.untimed:
            calls.timed_one(1.0 if number == 0 else 0.001)
        calls.short += 1
    assert calls.read()["call_seconds"] == pytest.approx(2 * 1.0 + 2998 * 0.001)
