"""Attention whose scores and mask are programs."""

from .api import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    flex_attention as flex_attention,
)
from .block_mask import BlockMask as BlockMask, create_block_mask as create_block_mask
