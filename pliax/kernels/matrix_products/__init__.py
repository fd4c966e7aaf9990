"""Products of stacked matrices, and what a library of general ones does twice over."""

from .api import (
    add_matmul as add_matmul,
    gram_is_fused as gram_is_fused,
    symmetric_matmul as symmetric_matmul,
)
from .xla import product as matmul, rounded as rounded


__all__ = ["add_matmul", "gram_is_fused", "matmul", "rounded", "symmetric_matmul"]
