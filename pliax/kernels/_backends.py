"""Several implementations of one meaning, and the rule that picks one.

An explicit name never falls back: it runs, or it raises with the reason. Without a
name the supported backend of the highest priority runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Attributes:
        name: What users write as `implementation=`.
        run: The implementation.
        supports: From the arguments to None, or the reason they are refused.
        priority: The supported backend with the highest one is the default.
        options: Names of the `kernel_options` it reads.
        by_default: What runs in its place, and may refuse more, where nobody named it.
        prepare: What it makes of the arguments while their contents are not traced.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[[Any], str | None]
    priority: int
    options: tuple[str, ...] = ()
    by_default: "Backend | None" = None
    prepare: Callable[[Any], Any] = lambda arguments: arguments


_FASTEST = (
    "Leave implementation=None to take the fastest one that supports the arguments."
)


def choose(
    operation: str, backends: Sequence[Backend], arguments: Any, name: str | None
) -> Backend:
    """The named backend, or the best one that supports the arguments.

    Args:
        operation: The public function, for error messages.
        backends: All implementations of it.
        arguments: What `Backend.supports` looks at.
        name: The user's explicit choice; None leaves it to the priorities.

    Raises:
        ValueError: If the name is unknown.
        NotImplementedError: If the named backend refuses the arguments, or all do.
    """
    ranked = sorted(backends, key=lambda backend: -backend.priority)
    candidates = [b for b in ranked if b.name == name]
    if name is None:
        candidates = [b.by_default or b for b in ranked]
    if not candidates:
        known = ", ".join(repr(b.name) for b in ranked)
        raise ValueError(
            f"{operation}: implementation={name!r} is unknown; there is {known}.\n"
            f"{_FASTEST}"
        )
    refusals = []
    for backend in candidates:
        reason = backend.supports(arguments)
        if reason is None:
            return backend
        refusals.append(f"{backend.name}: {reason}")
    remedy = "" if name is None else f"\n{_FASTEST}"
    raise NotImplementedError(f"{operation}: " + "; ".join(refusals) + f".{remedy}")


def integer_options(operation: str, options: Any) -> dict[str, int]:
    """`kernel_options` as names and integers of at least 1.

    Raises:
        TypeError: If they are something else.
        ValueError: If one is below 1.
    """
    options = {} if options is None else options
    names = isinstance(options, dict) and all(isinstance(x, str) for x in options)
    if not names or not all(type(x) is int for x in options.values()):
        raise TypeError(
            f"{operation}: kernel_options must be a dict from names to integers, found "
            f"{options!r}."
        )
    wrong = {name: n for name, n in options.items() if n < 1}
    if wrong:
        raise ValueError(
            f"{operation}: kernel_options must be at least 1, found {wrong}."
        )
    return dict(options)


def check_options(operation: str, backend: Backend, options: dict[str, Any]) -> None:
    """Refuse options the chosen backend does not read.

    Raises:
        ValueError: Naming the unknown options and the known ones; or if `interpret` is
            not 1.
    """
    unknown = sorted(set(options) - set(backend.options))
    if unknown:
        known = ", ".join(backend.options) or "none"
        raise ValueError(
            f"{operation}: kernel_options {unknown} are unknown to "
            f"implementation={backend.name!r}, which reads: {known}.\n"
            "Pass implementation= to name the one whose options they are."
        )
    if (interpret := options.get("interpret", 1)) != 1:
        raise ValueError(
            f"{operation}: kernel_options['interpret'] must be 1, found {interpret}.\n"
            "Leave it out to run the kernels on the GPU."
        )
