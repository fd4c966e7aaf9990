"""JAX's errors that the user's code catches while it is traced, and goes on after.

    noticing() : context manager  ->  Notes, which list these errors

JAX calls two symbolic sizes different and raises; with their values it may not have.
An error that reaches us makes a trace start again or stops it. One that a function
catches (`try: x + y`, `contextlib.suppress`) would leave the program for unequal sizes
without a guard. Python tells of raised and handled errors by `sys.monitoring`, which
costs nothing where nothing is raised; it is on during traces alone.

Errors about the values of tracers, about names and about the structure of trees do not
depend on sizes, and what only the device knows has no value in any trace.
"""

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterator
from sys import monitoring
from types import CodeType, FrameType

import jax

from .other_traces import UnknownSizeError
from .provenance import OURS, Place, is_of_jax, is_the_users, user_place


_ABOUT_OTHER_THINGS = (
    jax.errors.JAXTypeError,
    jax.errors.JAXIndexError,
    UnknownSizeError,
    AttributeError,
    KeyError,
    ImportError,
    NameError,
    StopIteration,
)
_WITHOUT_SIZES = ("tree.py", "tree_util.py")
_EVENTS = monitoring.events


_MARK = "_pliax_caught"  # an attribute: whoever keeps errors keeps frames and tracers


@dataclasses.dataclass(frozen=True, eq=False)
class CaughtError:
    """An error of JAX's that the user's code went on after.

    Attributes:
        text: what JAX said, in one line.
        place: the user's line that it was raised to.
        is_about_values: whether a size that has no value was its cause.
    """

    text: str
    place: Place
    is_about_values: bool


class Notes:
    """The errors of JAX's that the user's code caught in one trace."""

    def __init__(self):
        self.caught: list[CaughtError] = []

    def raised(self, error: BaseException, frame: FrameType) -> None:
        """Marks an error where it is raised first, if it is JAX's and about sizes."""
        self.raised_again(error)
        step = error.__traceback__
        if step is not None and step.tb_next is None and not hasattr(error, _MARK):
            found = _read(error, frame)
            if found is not None:
                setattr(error, _MARK, found)

    def handled(self, error: BaseException, code: CodeType) -> None:
        """Keeps an error of JAX's that the user's code handles."""
        found = getattr(error, _MARK, None)
        if found is not None and is_the_users(code):
            self.caught.append(found)

    def raised_again(self, error: BaseException) -> None:
        """Forgets an error that its handler let go."""
        found = getattr(error, _MARK, None)
        self.caught = [x for x in self.caught if x is not found]


def first_line(error: Exception) -> str:
    """What went wrong, in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"


def _read(error: BaseException, frame: FrameType) -> CaughtError | None:
    is_another = isinstance(error, _ABOUT_OTHER_THINGS)
    if is_another or not isinstance(error, Exception):
        return None
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(OURS):
        at = at.f_back
    if at is None or not is_of_jax(at.f_code):
        return None
    if at.f_code.co_filename.endswith(_WITHOUT_SIZES):
        return None
    handled = getattr(error.__context__, _MARK, None)
    is_about_values = (
        at is not frame  # a size has refused
        or isinstance(error, jax.errors.InconclusiveDimensionOperation)
        or (handled is not None and handled.is_about_values)
    )
    return CaughtError(first_line(error), user_place(at), is_about_values)


class _Listening(threading.local):
    """The traces of a thread that want to know."""

    def __init__(self):
        self.notes: list[Notes] = []


_listening = _Listening()
_lock = threading.Lock()
_count = _tool = 0
_TOOLS = (4, 3, 5, 2, 1, 0)  # Python gives the first two no purpose, the others names


@contextlib.contextmanager
def noticing() -> Iterator[Notes]:
    """Notes the errors of JAX's that the code of this thread catches."""
    found = Notes()
    _turn(+1)
    _listening.notes.append(found)
    try:
        yield found
    finally:
        _listening.notes.pop()
        _turn(-1)


def _turn(step: int) -> None:
    """Counts the traces of all threads that listen; the first and last one switch."""
    global _count, _tool
    with _lock:
        _count += step
        if (step, _count) == (1, 1):
            _tool = next(i for i in _TOOLS if monitoring.get_tool(i) is None)
            monitoring.use_tool_id(_tool, "pliax")
            for event, called in _CALLED.items():
                monitoring.register_callback(_tool, event, called)
            monitoring.set_events(_tool, sum(_CALLED))
        elif _count == 0:
            monitoring.set_events(_tool, _EVENTS.NO_EVENTS)
            for event in _CALLED:
                monitoring.register_callback(_tool, event, None)
            monitoring.free_tool_id(_tool)


def _raised(code: CodeType, _: int, error: BaseException) -> None:
    frame = sys._getframe(1)
    while frame.f_code is not code and frame.f_back:  # checkers of types lie between
        frame = frame.f_back
    for notes in _listening.notes:
        notes.raised(error, frame)


def _handled(code: CodeType, _: int, error: BaseException) -> None:
    for notes in _listening.notes:
        notes.handled(error, code)


def _raised_again(code: CodeType, _: int, error: BaseException) -> None:
    for notes in _listening.notes:
        notes.raised_again(error)


_CALLED = {
    _EVENTS.RAISE: _raised,
    _EVENTS.EXCEPTION_HANDLED: _handled,
    _EVENTS.RERAISE: _raised_again,
}
