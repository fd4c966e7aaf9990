"""PyTorch 2's compile stack, rebuilt as pure functions on JAX."""

from . import (
    core as core,
    distributed as distributed,
    kernels as kernels,
    optim as optim,
    transforms as transforms,
)
from .core.generator import Generator as Generator
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
from .transforms.compilation import compile as compile


__version__ = "0.1.0"
