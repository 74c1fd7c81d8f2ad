"""Data collators of transformers and TRL make the same batches as none, or are refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from lmms_stream.doors.huggingface.collators import CollatorAdapter, adapted
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.types import Batch
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    default_data_collator,
)
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TRLCollator

LENGTHS = (5, 9, 3)


def samples(*, learns_all: bool) -> list[dict[str, Any]]:
    made = []
    for number, length in enumerate(LENGTHS):
        ids = np.arange(10, 10 + length, dtype=np.int64) * (number + 1)
        labels = ids.copy()
        if not learns_all:
            labels[: length // 2] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def same(one: Batch, other: Batch) -> None:
    for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "sample_ids"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.max_seqlen, one.num_loss_tokens, one.source) == (other.max_seqlen, other.num_loss_tokens, other.source)


@pytest.mark.parametrize("pad_to", [None, 32])
@pytest.mark.parametrize(
    "make",
    [
        lambda tok: TRLCollator(pad_token_id=0),
        lambda tok: TRLCollator(pad_token_id=0, pad_to_multiple_of=8),
        lambda tok: TRLCollator(pad_token_id=0, padding_free=True),
        lambda tok: DataCollatorForSeq2Seq(tok),
        lambda tok: DataCollatorWithFlattening(),
        lambda tok: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
    ],
    ids=["trl", "trl padded", "trl padding free", "seq2seq", "flattening", "flattening with bounds"],
)
def test_a_collator_makes_the_batch_that_none_makes(
    make: Any, pad_to: int | None, tok: PreTrainedTokenizerFast
) -> None:
    collator = pickle.loads(pickle.dumps(adapted(make(tok))))
    given = samples(learns_all=False)
    same(
        collator(given, [4, 5, 6], source="one", pad_to=pad_to), collate(given, [4, 5, 6], source="one", pad_to=pad_to)
    )


@pytest.mark.filterwarnings("ignore")
def test_the_collator_of_language_models_learns_all(tok: PreTrainedTokenizerFast) -> None:
    collator = adapted(DataCollatorForLanguageModeling(tok, mlm=False))
    given = samples(learns_all=True)
    same(collator(given, [1, 2, 3]), collate(given, [1, 2, 3]))
    with pytest.raises(ConfigError, match="learns every token, and a sample says that some are not"):
        collator(samples(learns_all=False), [1, 2, 3])


def test_a_collator_may_change_tokens_and_labels() -> None:
    def doubled(features: list[dict[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = TRLCollator(pad_token_id=0)(features)
        return {**made, "input_ids": made["input_ids"] * 2}

    batch = adapted(doubled)(samples(learns_all=True), [1, 2, 3])
    assert batch.input_ids[0, :5].tolist() == [20, 22, 24, 26, 28]


def test_packs_that_only_pad_are_not_given_to_a_collator() -> None:
    same(adapted(TRLCollator(pad_token_id=0))([], []), collate([], []))


def test_a_collator_of_ours_stays_as_it_is() -> None:
    assert adapted(collate) is collate


@pytest.mark.parametrize(
    ("collator", "message"),
    [
        (5, "data_collator is a int, which cannot be called: give a function"),
        (lambda features: {"pixel_values": [0], "input_ids": [[1]], "labels": [[1]]}, "makes pixel_values, input_ids"),
        (lambda features: {"input_ids": [[1]]}, "a batch is made of input_ids and labels"),
        (lambda features: {"input_ids": [[1, 2]], "labels": [[1, 2]]}, "makes 1 sequences of 3 samples"),
        (
            lambda features: {"input_ids": [[1, 2]] * 3, "labels": [[1]] * 3, "attention_mask": [[1, 1]] * 3},
            r"makes input_ids \[3, 2\], labels \[3, 1\].*must have one shape",
        ),
    ],
)
def test_a_collator_that_makes_no_batch_is_refused(collator: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(collator)(samples(learns_all=True), [1, 2, 3])


def test_a_collator_that_masks_tokens_is_refused(tok: PreTrainedTokenizerFast) -> None:
    tok.mask_token = "<|pad|>"
    with pytest.raises(ConfigError, match=r"masks tokens \(mlm=True\), and the model predicts the next token: set mlm"):
        adapted(DataCollatorForLanguageModeling(tok))


def test_media_are_not_given_to_a_collator_of_texts() -> None:
    sample = {**samples(learns_all=True)[0], "media": {"pixel_values": np.zeros(3)}}
    with pytest.raises(ConfigError, match="default_data_collator cannot take samples with media: leave it out"):
        CollatorAdapter(default_data_collator)([sample], [1])
