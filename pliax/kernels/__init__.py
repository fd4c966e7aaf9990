"""Floor 1: arrays -> arrays, several implementations of one meaning."""

from .attention import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    BlockMask as BlockMask,
    create_block_mask as create_block_mask,
    flex_attention as flex_attention,
)
