"""The figures of a record by LMMS Engine's names. record -> [this] -> more figures; arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "train/loss": "loss",
    "train/ce": "loss/ce",  # of texts and of images, by BAGEL's task
    "train/mse": "loss/mse",
    "train/lr": "learning_rate",
    "train/grad_norm": "grad_norm",
    "train/mfu": "perf/mfu",
    "train/total_tokens": "tokens_seen",
    "train/tokens_per_second": "perf/tokens_per_s",
    "train/epoch": "epoch",
}  # theirs -> ours


def engine_figures(
    record: Mapping[str, Any], *, pack_tokens: tuple[float, float, float], world_size: int
) -> dict[str, Any]:
    """What a record of training has by their names; nothing for other records.

    pack_tokens: mean, least and most of the packed sequences since the last record, which is what their guide has as
    perf/global_seq_len_*.
    """
    if "loss" not in record:
        return {}
    figures = {theirs: record[ours] for theirs, ours in NAMES.items() if ours in record}
    if "perf/tokens_per_s" in record:
        figures["train/tokens_per_gpu"] = record["perf/tokens_per_s"] / world_size
    lengths = zip(("avg", "min", "max"), pack_tokens, strict=True)
    return figures | {f"perf/global_seq_len_{name}": value for name, value in lengths}
