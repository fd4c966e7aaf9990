"""A pause of Python's search for garbage while a program is traced and lowered.

    garbage_left_alone : while a call is served for the first time,
    garbage_searched   : but not while XLA compiles, which may take minutes

Tracing and lowering make many objects that live on, and hardly any garbage. But
whenever there are many new ones, Python looks through all there are: a third of the
time that the train step of `benchmarks/bench_compile.py` took to trace.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pauses:
    """How many threads have paused it, and whether it goes on after the last."""

    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False

    def begin(self) -> None:
        """Pauses it, if nobody has yet."""
        with self.lock:
            if not self.count:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.count += 1

    def end(self) -> None:
        """Lets it go on, if nobody else has paused it."""
        with self.lock:
            self.count -= 1
            if not self.count and self.was_enabled:
                gc.enable()


_pauses = _Pauses()


@contextlib.contextmanager
def garbage_left_alone() -> Iterator[None]:
    """A context in which Python does not search for garbage; it may be nested."""
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


@contextlib.contextmanager
def garbage_searched() -> Iterator[None]:
    """A context inside of `garbage_left_alone` in which Python searches all the same.

    Unless another thread, or an outer trace, has paused it too.
    """
    _pauses.end()
    try:
        yield
    finally:
        _pauses.begin()
