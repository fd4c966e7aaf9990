"""Momentum of matrices, whose look-ahead is rounded and stacked in the same pass."""

from .api import Static as Static, look_ahead as look_ahead, refused as refused
