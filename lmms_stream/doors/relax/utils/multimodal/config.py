"""Relax's limits on media."""

from __future__ import annotations

from ...prompts import MultimodalConfig

__all__ = ["MultimodalConfig"]
