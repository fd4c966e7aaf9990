"""The executables that XLA builds in this process, by what JAX tells of them."""

import threading
from typing import Any

import jax.monitoring

from pliax.core._jax import compile_event


class Builds:
    """A count of executables, and what this thread's last one was."""

    __slots__ = ("_last", "count")

    def __init__(self):
        self.count = 0
        self._last = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    @property
    def seconds(self) -> float:
        """Seconds in XLA for the last executable that this thread had built."""
        return getattr(self._last, "seconds", 0.0)

    @property
    def name(self) -> str:
        """The name that JAX gave the last executable that this thread had built."""
        return getattr(self._last, "name", "")

    def _listen(self, event: str, duration_secs: float, **facts: Any) -> None:
        if event == compile_event:
            self._last.seconds = duration_secs
            self._last.name = facts.get("fun_name", "")
            self.count += 1


builds = Builds()
