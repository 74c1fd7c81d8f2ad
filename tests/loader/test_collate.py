from __future__ import annotations

import numpy as np
import torch
from lmms_stream.loader.collate import collate
from lmms_stream.types import Processed


def processed(*labels: int) -> Processed:
    return {"input_ids": np.arange(10, 10 + len(labels)), "labels": np.array(labels)}


def test_samples_stand_one_after_another_with_positions_that_restart() -> None:
    batch = collate([processed(10, 11, -100), processed(-100, 11)], [7, 3], step=2, micro_batch=1)
    assert batch.input_ids.tolist() == [[10, 11, 12, 10, 11]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 3
    assert batch.sample_ids.tolist() == [7, 3]
    assert (batch.step, batch.micro_batch, batch.num_tokens) == (2, 1, 5)


def test_no_sample_predicts_the_first_token_of_the_next() -> None:
    batch = collate([processed(10, 11), processed(10, 11)], [0, 1])
    assert batch.labels.tolist() == [[-100, 11, -100, 11]]
    assert batch.num_loss_tokens == 2


def test_padding_is_a_segment_of_its_own_without_labels() -> None:
    batch = collate([processed(10, 11)], [0], pad_to=6)
    assert batch.num_tokens == 6
    assert batch.cu_seqlens.tolist() == [0, 2, 6]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert batch.labels.tolist() == [[-100, 11, -100, -100, -100, -100]]
    assert collate([processed(10, 11)], [0], pad_to=2).num_tokens == 2


def test_a_pack_without_samples_has_nothing_to_learn() -> None:
    batch = collate([], [])
    assert batch.num_tokens == 2
    assert batch.num_loss_tokens == 0
    assert batch.sample_ids.tolist() == []
    assert collate([], [], pad_to=8).num_tokens == 8


def test_moving_a_batch_keeps_its_values() -> None:
    batch = collate([processed(10, 11)], [5], step=3)
    moved = batch.to(torch.device("cpu"))
    assert moved.sample_ids.tolist() == [5]
    assert torch.equal(moved.labels, batch.labels)
    assert moved.step == 3
