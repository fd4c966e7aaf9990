"""Momentum of matrices, whose look-ahead is rounded and stacked in the same pass."""

from .api import Static as Static, refused as refused, stacked as stacked
