"""LMMS Engine's datasets of numbered packs by their names."""

from __future__ import annotations

from ....datasets.multimodal import MultiModalDataset

BaseDataset = MultiModalDataset
VisionSFTDataset = VisionAudioSFTDataset = QwenOmniSFTDataset = MultiModalDataset
Qwen3VLDataset = RaeDataset = SitDataset = LLaVAVideoDataset = MultiModalDataset

__all__ = [
    "BaseDataset",
    "LLaVAVideoDataset",
    "MultiModalDataset",
    "Qwen3VLDataset",
    "QwenOmniSFTDataset",
    "RaeDataset",
    "SitDataset",
    "VisionAudioSFTDataset",
    "VisionSFTDataset",
]
