"""Exact padding: a program on arrays that are longer than their contents."""

from .rules import PaddingRefused as PaddingRefused
