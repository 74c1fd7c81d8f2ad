"""Relax's limits on media."""

from __future__ import annotations

from ....rl.multimodal_config import MultimodalConfig

__all__ = ["MultimodalConfig"]
