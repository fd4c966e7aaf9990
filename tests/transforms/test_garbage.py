"""While a program is traced Python searches for no garbage, and goes on thereafter."""

import gc
import threading

import numpy as np
import pytest

import pliax as px
from pliax.transforms._garbage import garbage_left_alone


ONES = np.ones(3, np.float32)


def test_a_trace_is_not_interrupted_and_a_call_is_not_concerned():
    seen = []
    f = px.compile(lambda x: (seen.append(gc.isenabled()), x * 2)[1], dims={"x": "t"})
    f(ONES)
    f(ONES)
    assert seen == [False] and gc.isenabled()


def test_it_goes_on_after_an_error():
    def broken(x):
        raise KeyError("x")

    with pytest.raises(KeyError):
        px.compile(broken, dims={"x": "t"})(ONES)
    assert gc.isenabled()


def test_the_last_of_several_threads_lets_it_go_on():
    entered, left = threading.Event(), threading.Event()

    def other():
        with garbage_left_alone():
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=other)
    with garbage_left_alone():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    left.set()
    thread.join()
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off():
    gc.disable()
    try:
        px.compile(lambda x: x * 2, dims={"x": "t"})(ONES)
        assert not gc.isenabled()
    finally:
        gc.enable()
