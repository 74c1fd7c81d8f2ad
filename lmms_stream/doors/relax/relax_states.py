"""Relax's saved states: a .pt file -> values; where a dataset stands by them. No code of a pickle is run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointError, CursorError
from ...extras import need
from ...storage.storage import Storage
from .base import BaseDataset
from .dataset import Dataset

FOLDERS = ("dataset", "rollout")  # that Relax has saved to, the newer first


def read_relax_state(store: Storage, key: str) -> dict[str, Any]:
    """The values of a .pt file; CheckpointError where it holds other things than plain values and tensors."""
    need("torch", by="states of Relax's")
    import torch

    where = f"{store.url}/{key}"
    try:
        state = torch.load(io.BytesIO(store.read(key)), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{where} cannot be read without running what is pickled in it ({str(error).splitlines()[0][:200]}): take "
            "an earlier state, or one whose metadata hold numbers and texts alone"
        ) from error
    if not isinstance(state, dict) or not {"sample_offset", "epoch_id", "sample_index"} <= state.keys():
        raise CheckpointError(f"{where} is no state of Relax's data source: take another")
    return state


def follow_relax(
    dataset: BaseDataset, state: Mapping[str, Any], *, is_shuffled: bool, drops_unordered: bool = False
) -> None:
    """Stand where Relax's dataset stood, in its order.

    is_shuffled: with --rollout-shuffle. drops_unordered: whether Relax's eager dataset has measured prompts by a
    processor, after which its samples are in the order in which its processes were done. CursorError for a place that
    cannot be found again.
    """
    if state.get("use_streaming"):
        _follow_streaming(dataset, state.get("streaming_state") or {}, is_shuffled=is_shuffled)
        return
    if drops_unordered:
        raise CursorError(
            "the state is of Relax's eager dataset with a processor and --rollout-max-prompt-len, whose samples come "
            "in another order in each run: begin anew, or drop long prompts from the files and leave the flag out"
        )
    offset, epoch_id = int(state["sample_offset"]), int(state["epoch_id"])
    if offset < 0 or epoch_id < 0:
        raise CursorError(f"the state has sample_offset {offset} and epoch_id {epoch_id}: it is damaged; take another")
    drops = dataset.may_drop
    if drops and not isinstance(dataset, Dataset):
        raise CursorError(
            "the state is of Relax's eager dataset, which counts the samples it has kept, and --rollout-max-prompt-len "
            "drops some: load it without --use-streaming-dataset; states saved from then on fit both"
            if not is_shuffled
            else "the state is of Relax's eager dataset, which shuffles the samples it has kept, and "
            "--rollout-max-prompt-len drops some: load it without --use-streaming-dataset"
        )
    num_kept = len(dataset)
    position = min(offset, num_kept)  # Relax counts on where a request was larger than the dataset
    if isinstance(dataset, Dataset) and drops:
        dataset.follow_relax_order()
        kept = np.delete(np.arange(dataset.num_rows), dataset.dropped_rows)
        position = position if is_shuffled else int(kept[position]) if position < num_kept else dataset.num_rows
    else:
        dataset.follow("relax")
    dataset.index_manager.begin(epoch_id, is_shuffled=is_shuffled, position=position)


def _follow_streaming(dataset: BaseDataset, state: Mapping[str, Any], *, is_shuffled: bool) -> None:
    position = state.get("position", 0)
    if not is_shuffled and 0 < position < dataset.num_rows:
        raise CursorError(
            "the state stands within an epoch of Relax's StreamingDataset, which most versions shuffle, asked or not: "
            "set --rollout-shuffle to go on in that order, or begin anew"
        )
    dataset.load_state(state)
    if not is_shuffled:
        dataset.index_manager.begin(dataset.epoch_id, is_shuffled=False, position=dataset.position)
