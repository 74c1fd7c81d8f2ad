"""LMMS Engine's collators by their names: packs of a dataset -> a Batch; samples of a processor -> padded tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from ....checks import NamedLikeTheirs
from ....loader.collate import PackCollator
from ....processors.base import IGNORED_LABEL

__all__ = ["BagelCollator", "LLaVACollator", "VisionCollator"]


class VisionCollator(NamedLikeTheirs, PackCollator):
    """Collator of get_collator(), which also accepts the output of `processor`.

    For mappings from a processor, or lists of mappings, return input_ids, labels and attention_mask, int64[B, T] each,
    padded on the tokenizer's side, position_ids int64[axes, B, T] of a processor that makes them, and every other
    tensor of all samples concatenated on axis 0.
    """

    NOT_CALLED: ClassVar = dict.fromkeys(("image_token_id", "pad_sequence"), "override __call__")
    CALLER: ClassVar = "__call__"

    def __init__(self, processor: Any = None):
        self.processor = processor

    def __call__(self, packs: Sequence[Any], sample_ids: Sequence[int] | None = None, **options: Any) -> Any:
        samples = list(_flat(packs))
        if sample_ids is not None or not samples or not all(isinstance(each, Mapping) for each in samples):
            return super().__call__(packs, sample_ids, **options)
        ids = [torch.as_tensor(each["input_ids"]) for each in samples]
        tokenizer = getattr(self.processor, "tokenizer", None)
        padding, side = getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "padding_side", "right")
        fillings = {"input_ids": padding or 0, "labels": IGNORED_LABEL, "attention_mask": 0, "position_ids": 0}
        columns: dict[str, list[torch.Tensor]] = {"attention_mask": [torch.ones_like(each) for each in ids]}
        for name in dict.fromkeys(name for each in samples for name in each if name != "attention_mask"):
            columns[name] = [torch.as_tensor(each[name]) for each in samples if name in each]
        return {
            name: _padded(each, fillings[name], side) if name in fillings else torch.cat(each)
            for name, each in columns.items()
        }


LLaVACollator = BagelCollator = VisionCollator


def _padded(values: Iterable[torch.Tensor], filling: int, side: str) -> torch.Tensor:
    """Pad values of tokens: [T] each -> [B, T], [axes, T] each -> [axes, B, T]."""
    rows = pad_sequence([each.movedim(-1, 0) for each in values], True, filling, side)
    return rows if rows.ndim == 2 else rows.movedim(-1, 0)


def _flat(packs: Iterable[Any]) -> Iterable[Any]:
    for each in packs:
        yield from each if isinstance(each, list) else [each]
