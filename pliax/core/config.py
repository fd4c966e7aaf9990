"""What the environment asks for: PLIAX_LOGS=guards,recompiles,dynamic.

Three loggers tell what happens while it happens, all at the level DEBUG:

    pliax.guards      each guard, with the line that asked and why
    pliax.recompiles  each trace and each executable, and what no earlier one served
    pliax.dynamic     which sizes are symbols or constants, buckets, padding refused

`PLIAX_LOGS` turns them on from outside; ``logging.getLogger("pliax.guards").setLevel``
does from inside. Only the slow path of a call logs, so that they cost nothing after.
"""

import logging
import os
import sys
import warnings
from typing import Any


_NAMES = ("guards", "recompiles", "dynamic")
_VARIABLE = "PLIAX_LOGS"

_parent = logging.getLogger("pliax")
guards_log, recompiles_log, dynamic_log = map(_parent.getChild, _NAMES)


class _ToStderr(logging.StreamHandler):
    """Prints each record once: where nobody else would, or where the variable says."""

    def __init__(self):
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    @property
    def stream(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Today's stderr, which may have been replaced since the import."""
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        """Leaves a record to the handlers of the root logger if it gets there."""
        if _parent.propagate and logging.getLogger().handlers:
            return False
        return super().filter(record)


def read_logs(text: str | None) -> None:
    """Turns on the loggers that a value of PLIAX_LOGS names.

    What they print goes to stderr and to no other handler, as with TORCH_LOGS.

    Args:
        text: names with commas between them, or "all"; None where it is not set.

    Warns:
        UserWarning: for a name that there is not.
    """
    if not any(isinstance(handler, _ToStderr) for handler in _parent.handlers):
        _parent.addHandler(_ToStderr())
    asked = [name.strip() for name in (text or "").split(",") if name.strip()]
    names = _NAMES if "all" in asked else [name for name in asked if name in _NAMES]
    for name in names:
        _parent.getChild(name).setLevel(logging.DEBUG)
    if names:
        _parent.propagate = False
    unknown = [name for name in asked if name not in (*_NAMES, "all")]
    if unknown:
        warnings.warn(
            f"{_VARIABLE}={text}: found {unknown[0]!r}, which is no log.\n"
            f"Name some of {', '.join(_NAMES)}, with commas between them, or all.",
            stacklevel=2,
        )


read_logs(os.environ.get(_VARIABLE))
