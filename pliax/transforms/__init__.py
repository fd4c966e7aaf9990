"""Floor 1: function -> function."""

from .compilation import (
    CompiledFunction as CompiledFunction,
    RecompileLimitError as RecompileLimitError,
    Stats as Stats,
    compile as compile,
)
from .guard_validation import (
    GuardReport as GuardReport,
    GuardValidationError as GuardValidationError,
    validate_guards as validate_guards,
)
from .padding import PaddingRefused as PaddingRefused
from .padding.api import PaddedFunction as PaddedFunction, pad as pad
from .size_classes import (
    SizeClass as SizeClass,
    SizeClasses as SizeClasses,
    infer_sizes as infer_sizes,
)
