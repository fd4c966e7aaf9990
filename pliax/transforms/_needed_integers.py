"""Which Python integers of a call a program needs as constants: axes, decimals.

JAX's error names the line that needed one, not which; so traces tell, by halving.
"""

from collections.abc import Callable, Sequence


_MOST_TRACES = 16  # then the integers that are still together are constants together


def needed_integers[Integer](
    integers: Sequence[Integer],
    failure: Callable[[Sequence[Integer]], Exception | None],
    error: Exception,
) -> dict[Integer, str]:
    """The integers that must be constants, and why.

    Args:
        integers: at least one, with which as run-time values a trace fails.
        failure: what goes wrong where these alone are run-time values, if anything.
        error: what goes wrong where all of them are.

    Returns:
        Those that fail alone, each with its reason. All of them where that is not so
        simple: without any the trace fails likewise, or each alone is traced.
    """
    together = dict.fromkeys(integers, str(error))
    if len(integers) == 1 or isinstance(failure(()), type(error)):
        return together
    found: dict[Integer, str] = {}
    groups, left = [(integers, error)], _MOST_TRACES
    while groups:
        group, reason = groups.pop()
        if len(group) == 1 or left < 2:
            found |= dict.fromkeys(group, str(reason))
            continue
        half, left = len(group) // 2, left - 2
        for part in (group[half:], group[:half]):
            why = failure(part)
            if why is not None:
                groups.append((part, why))
    return found or together
