"""Floor 1: arrays as long as data says, counted on the device."""

from pliax.core.ragged import Ragged as Ragged

from .repetition import repeat as repeat
from .selections import (
    boolean_mask as boolean_mask,
    nonzero as nonzero,
    unique as unique,
)
