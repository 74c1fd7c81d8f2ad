"""Relax's function that loads functions."""

from __future__ import annotations

from ..opening import load_function

__all__ = ["load_function"]
