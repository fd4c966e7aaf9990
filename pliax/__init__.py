"""PyTorch 2's compile stack, rebuilt as pure functions on JAX."""

from . import (
    core as core,
    distributed as distributed,
    kernels as kernels,
    optim as optim,
    ragged as ragged,
    transforms as transforms,
)
from .core.collapse import ConstraintViolationError as ConstraintViolationError
from .core.conditions import (
    check as check,
    guard_or_false as guard_or_false,
    guard_or_true as guard_or_true,
    statically_known_true as statically_known_true,
    sym_and as sym_and,
    sym_or as sym_or,
)
from .core.generator import Generator as Generator
from .core.marks import (
    Dim as Dim,
    dynamic as dynamic,
    maybe_dynamic as maybe_dynamic,
    static as static,
)
from .kernels import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    BlockMask as BlockMask,
    and_masks as and_masks,
    create_block_mask as create_block_mask,
    create_mask as create_mask,
    flex_attention as flex_attention,
    noop_mask as noop_mask,
    not_mask as not_mask,
    or_masks as or_masks,
)
from .transforms.compilation import (
    RecompileLimitError as RecompileLimitError,
    compile as compile,
)
from .transforms.guard_validation import (
    GuardValidationError as GuardValidationError,
    validate_guards as validate_guards,
)
from .transforms.padding import PaddingRefused as PaddingRefused
from .transforms.padding.api import pad as pad
from .transforms.size_classes import infer_sizes as infer_sizes


__version__ = "0.1.0"
