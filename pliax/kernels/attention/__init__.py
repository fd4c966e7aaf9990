"""Attention whose scores and mask are programs."""

from . import masks as masks, mods as mods, paging as paging
from .api import (
    AuxOutput as AuxOutput,
    AuxRequest as AuxRequest,
    flex_attention as flex_attention,
)
from .block_mask import (
    BlockMask as BlockMask,
    create_block_mask as create_block_mask,
    create_mask as create_mask,
)
from .masks import (
    and_masks as and_masks,
    noop_mask as noop_mask,
    not_mask as not_mask,
    or_masks as or_masks,
)
from .paging import PagedCache as PagedCache
