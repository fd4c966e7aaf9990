"""What serves the calls made so far, of the latest thousands of sizes.

KnownCalls : kind of call, sizes  ->  Bound

A Python integer that counts the steps of a loop makes every call one of new sizes. So
they are forgotten, all at once, as soon as there are too many.
"""

from collections.abc import Hashable, Iterator
from typing import Any


_LIMIT = 4096  # of about 9 kB each


class KnownCalls:
    """What serves the calls of the latest sizes, and what served those before."""

    def __init__(self):
        self._latest: dict[Hashable, Any] = {}
        self._before: dict[Hashable, Any] = {}

    def get(self, call: Hashable) -> Any:
        """What serves a call, if it is known."""
        return self._latest.get(call)

    def add(self, call: Hashable, bound: Any) -> None:
        """Remembers what serves a call."""
        self._latest[call] = bound

    @property
    def are_too_many(self) -> bool:
        """Whether they have to be forgotten before another is added."""
        return len(self._latest) >= _LIMIT

    def forget(self) -> None:
        """Starts anew."""
        self._latest, self._before = {}, self._latest

    def counted(self) -> Iterator[tuple[Any, Any]]:
        """What served the latest calls, forgotten or not, and counts them."""
        yield from list(self._before.items())
        yield from list(self._latest.items())
