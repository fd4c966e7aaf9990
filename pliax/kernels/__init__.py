"""Floor 1: arrays -> arrays, several implementations of one meaning."""

from .attention import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    BlockMask as BlockMask,
    PagedCache as PagedCache,
    and_masks as and_masks,
    create_block_mask as create_block_mask,
    create_mask as create_mask,
    flex_attention as flex_attention,
    masks as masks,
    mods as mods,
    noop_mask as noop_mask,
    not_mask as not_mask,
    or_masks as or_masks,
    paging as paging,
)
from .matrix_products import symmetric_matmul as symmetric_matmul
