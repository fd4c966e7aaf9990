"""Floor 1: function -> function."""

from .compilation import (
    CompiledFunction as CompiledFunction,
    Stats as Stats,
    compile as compile,
)
