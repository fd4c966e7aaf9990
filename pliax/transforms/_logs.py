"""What the logs "recompiles" and "dynamic" say of executables, sizes and buckets."""

import logging
from collections.abc import Callable, Mapping, Sequence

from pliax.core.config import dynamic_log, recompiles_log

from ._deciding import Decision, Position
from ._families import Reading


def tell_trace(owner: str, number: int, reason: str) -> None:
    """Tells why Python runs the function again."""
    recompiles_log.debug("%s: trace %s: %s", owner, number, _indented(reason))


def tell_executable(owner: str, group: str, reason: str) -> None:
    """Tells why XLA compiles, and for which sizes."""
    sizes = f" for {group}" if group else ""
    recompiles_log.debug("%s: compilation%s: %s", owner, sizes, _indented(reason))


def tell_sizes(
    owner: str,
    told: Mapping[Position, Decision],
    decided: Mapping[Position, Decision],
    reading: Reading,
    sizes: Sequence[int],
) -> None:
    """Tells which sizes became symbols or constants, and why.

    A size that was told before, and is still what it was, is not told again.
    """
    if not dynamic_log.isEnabledFor(logging.DEBUG):
        return
    for position, wanted, size in zip(
        reading.positions, reading.wanted, sizes, strict=True
    ):
        decision = decided.get(position, Decision(False))
        earlier = told.get(position, Decision(False))
        is_news = (decision.is_dynamic, bool(decision.why)) != (
            earlier.is_dynamic,
            bool(earlier.why),
        )
        if is_news and decision.why:
            what = f"dynamic ({wanted})" if decision.is_dynamic else "static"
            dynamic_log.debug(
                "%s: %s = %s is %s: %s",
                owner, position.name, size, what, decision.why,
            )  # fmt: skip


def tell_bucket(
    owner: str, name: str, size: int, length: int, why: str | Callable[[], str]
) -> None:
    """Tells in which bucket a size runs."""
    if dynamic_log.isEnabledFor(logging.DEBUG):
        why = why if isinstance(why, str) else why()
        text = "%s: %s = %s runs in the bucket of %s: %s"
        dynamic_log.debug(text, owner, name, size, length, why)


def tell_refusal(owner: str, text: str) -> None:
    """Tells what cannot be padded, or not be traced for all sizes, with its line."""
    dynamic_log.debug("%s: %s", owner, text)


def _indented(text: str) -> str:
    """Further lines set in, so that each record begins at the margin."""
    return text.replace("\n", "\n  ")
