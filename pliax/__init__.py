"""PyTorch 2's compile stack, rebuilt as pure functions on JAX."""

from . import core as core, kernels as kernels
from .kernels import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    BlockMask as BlockMask,
    create_block_mask as create_block_mask,
    flex_attention as flex_attention,
)


__version__ = "0.1.0"
