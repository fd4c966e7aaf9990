"""Where something came from: the user's line behind a frame or an equation."""

import dataclasses
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np

from ._jax import equation_frames


OURS = str(Path(__file__).parents[1])
_JAX = str(Path(jax.__file__).parent)
_CHECKS = "<@beartype"  # the files of what beartype writes
NOT_THE_USERS = (OURS, _JAX, _CHECKS)  # files that warnings pass over
_LIBRARIES = (_JAX, OURS, str(Path(np.__file__).parent))
_PYTHONS = str(Path(dataclasses.__file__).parent)
_PASSED_THROUGH = ("jax", "jaxlib", "pliax", "functools", "contextlib", "threading")
_PASSED_THROUGH += ("jaxtyping", "beartype", "numpy", "einops")


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's code.

    Attributes:
        file: its path.
        line: its number, from 1.
        function: the qualified name of the function it stands in.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} in {self.function}" + (text and f": {text}")


NOWHERE = Place("<unknown>", 0, "<unknown>")


def user_place(frame: FrameType | None, *, only: bool = False) -> Place:
    """The nearest line at a frame, or above it, that is the user's.

    Neither JAX's, NumPy's, Python's (a `Counter` that looks a size up) nor ours.

    Args:
        frame: where to begin.
        only: whether to look at this frame alone.
    """
    at = frame
    while at is not None:
        module = at.f_globals.get("__name__", "").partition(".")[0]
        if module not in _PASSED_THROUGH and not _is_no_text_of_the_users(at):
            return Place(at.f_code.co_filename, at.f_lineno, at.f_code.co_qualname)
        at = None if only else at.f_back
    return NOWHERE


def calling_place() -> Place:
    """The user's line that has called us, nearest to what runs now."""
    return user_place(sys._getframe(1))


def _is_passed(file: str) -> bool:
    """Whether a file is ours, or a checker's of types that wraps our functions."""
    parts = Path(file).parts
    checks = "jaxtyping" in parts or "beartype" in parts or file.startswith(_CHECKS)
    return file.startswith(OURS) or checks


def is_of_jax(code: CodeType) -> bool:
    """Whether some code is a part of JAX."""
    return code.co_filename.startswith(_JAX)


def is_the_users(code: CodeType) -> bool:
    """Whether some code is neither JAX's, NumPy's, Python's nor ours."""
    file = code.co_filename
    is_of_others = file.startswith(_LIBRARIES) or _is_pythons(file) or _is_passed(file)
    return not (is_of_others or _is_generated(code))


def _is_pythons(file: str) -> bool:
    """Whether a file is of Python's own library."""
    return file.startswith(_PYTHONS) and "-packages" not in file


def _is_generated(code: CodeType) -> bool:
    """Whether dataclasses or attrs wrote some code, such as an `__eq__`.

    What a user gives to exec or `python -c` has the file "<string>" as well.
    """
    if code.co_filename.startswith("<attrs generated"):
        return True
    return code.co_filename == "<string>" and "__create_fn__" in code.co_qualname


def _is_no_text_of_the_users(frame: FrameType) -> bool:
    """Whether Python's library, or a class that it or attrs made, runs in a frame."""
    name = frame.f_globals.get("__name__") or ""
    code = frame.f_code
    is_of_a_namedtuple = code.co_filename == "<string>" and name.startswith(
        "namedtuple_"
    )
    return is_of_a_namedtuple or _is_generated(code) or _is_pythons(code.co_filename)


def equation_place(eqn: Any) -> Place:
    """The nearest line, neither JAX's nor ours, that an equation was traced from."""
    frames = [f for f in equation_frames(eqn) if not _is_passed(f.file_name)]
    if not frames:
        return NOWHERE
    frame = frames[0]
    return Place(frame.file_name, frame.start_line, frame.function_name)
