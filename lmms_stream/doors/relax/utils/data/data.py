"""Relax's eager dataset."""

from __future__ import annotations

from ...base import BaseDataset
from ...dataset import Dataset
from .. import refused_names

__all__ = ["BaseDataset", "Dataset"]

__getattr__ = refused_names(
    __name__,
    {
        "get_minimum_num_micro_batch_size": "it plans Relax's training; packs of a token budget are what "
        "lmms_stream.PackedStreamingDataset makes"
    },
)
