"""Laws of the counts of calls."""

import numpy as np
import pytest

from pliax.transforms._ledger import Calls


def dispatch(calls, seconds):
    """What the dispatcher does with a call; whether it is timed."""
    if calls.untimed:
        calls.untimed.pop()
        return False
    calls.timed_one(seconds)
    return True


def test_calls_are_timed_ever_less_often_and_stand_for_all():
    calls, timed = Calls(valid=3, held=4), []
    for number in range(5000):
        if dispatch(calls, 1e-3):
            timed.append(number)
    assert timed[:5] == [0, 2, 4, 8, 16]
    assert np.diff(timed).max() == 1024
    read = calls.read()
    assert read["call_seconds"] == pytest.approx(5.0)
    assert (read["calls"], read["valid"], read["held"]) == (5000, 15000, 20000)


def test_a_slow_first_call_stands_for_few():
    calls = Calls(valid=1, held=1)
    for number in range(3000):
        dispatch(calls, 1.0 if number == 0 else 0.001)
    assert calls.read()["call_seconds"] == pytest.approx(2 * 1.0 + 2998 * 0.001)


def test_threads_that_count_at_once_lose_no_call():
    """Two see that none is left before the next timed one, or that one is."""
    calls = Calls(valid=1, held=1)
    for number in range(3000):
        if not calls.untimed:
            calls.timed_one(1e-3)
            calls.timed_one(1e-3)
        else:
            for _ in range(2):
                if calls.untimed:
                    calls.untimed.pop()
                else:
                    calls.due += 1
        assert calls.count == 2 * (number + 1)
    assert 0.9 * 6.0 < calls.read()["call_seconds"] < 1.1 * 6.0
