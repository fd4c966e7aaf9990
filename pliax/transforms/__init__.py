"""Floor 1: function -> function."""

from .compilation import (
    CompiledFunction as CompiledFunction,
    RecompileLimitError as RecompileLimitError,
    Stats as Stats,
    compile as compile,
)
from .padding import PaddingRefused as PaddingRefused
from .padding.api import PaddedFunction as PaddedFunction, pad as pad
