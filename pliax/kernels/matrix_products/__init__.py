"""Products of stacked matrices, and what a library of general ones does twice over."""

from .api import add_matmul as add_matmul, symmetric_matmul as symmetric_matmul
from .backends import may_be_fused as may_be_fused
from .xla import product as matmul, rounded as rounded


__all__ = ["add_matmul", "matmul", "may_be_fused", "rounded", "symmetric_matmul"]
