from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream import PackingConfig
from lmms_stream.errors import DataError, ObjectMissingError
from lmms_stream.loader.batch_maker import BatchMaker, LoaderSettings
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.mixture import Mixture
from lmms_stream.plan.packing import Overlong
from lmms_stream.plan.planner import StepConfig, StepPlanner
from lmms_stream.processors.base import Tokens
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.tokenizers import ONE_THREAD, VARIABLE
from lmms_stream.storage.local import CopiedFolder
from lmms_stream.types import Processed, Sample, World

from .test_left_out import BAD, RAISES, SLEEPS, open_dataset, shown


class _OneByOne:
    """Processes chats one at a time."""

    columns, schema = ChatProcessor.columns, ChatProcessor.schema

    def __init__(self, chats: ChatProcessor):
        self.chats, self.description, self.measure = chats, chats.description, chats.measure

    def process(self, sample: Sample) -> Processed:
        return _checked(sample, self.chats)


class _AtOnce(_OneByOne):
    """Tokenizes several samples at once, and notes how many."""

    def __init__(self, chats: ChatProcessor):
        super().__init__(chats)
        self.at_once: list[int] = []

    def process(self, sample: Sample) -> Processed:
        return super().process(sample)

    def tokenize_all(self, samples: Sequence[Sample]) -> list[Tokens | DataError]:
        self.at_once.append(len(samples))
        for sample in samples:
            if SLEEPS in str(sample):
                raise ValueError("one of these samples is damaged")
        made = self.chats.tokenize_all(samples)
        return [
            DataError("this sample does not fit") if RAISES in str(sample) else each
            for sample, each in zip(samples, made, strict=True)
        ]


class _WithoutShards(CopiedFolder):
    """A store that lost its shards, and counts how often they are asked for."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.asked: list[str] = []

    def download(self, key: str, path: Path) -> None:
        if key.endswith(".mds"):
            self.asked.append(key)
            raise ObjectMissingError(f"{key} does not exist")
        super().download(key, path)


def _checked(sample: Sample, chats: ChatProcessor) -> Processed:
    if SLEEPS in str(sample):
        raise ValueError("this sample is damaged")
    if RAISES in str(sample):
        raise DataError("this sample does not fit")
    return chats.process(sample)


class _CountedKeys(dict[str, Any]):
    """A processed sample that counts how often its keys are looked at."""

    num_looks = 0

    def keys(self) -> Any:
        type(self).num_looks += 1
        return super().keys()


class _Counts(_OneByOne):
    def process(self, sample: Sample) -> Processed:
        return _CountedKeys(self.chats.process(sample))


class _TellsThreads(_OneByOne):
    """Labels say whether a tokenizer would start threads."""

    def process(self, sample: Sample) -> Processed:
        processed = self.chats.process(sample)
        return {
            **processed,
            "labels": np.full_like(processed["labels"], os.environ.get(VARIABLE) != ONE_THREAD[VARIABLE]),
        }


@pytest.mark.parametrize("overlong", ["drop", "split"])
def test_samples_of_a_pack_are_tokenized_at_once_and_each_has_its_own_error(
    dataset_folder: Path, chat_processor: ChatProcessor, overlong: Overlong, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # many texts are encoded in one call
    found: list[tuple[Any, ...]] = []
    for processor in (_OneByOne(chat_processor), at_once := _AtOnce(chat_processor)):
        dataset = open_dataset(dataset_folder, processor, overlong=overlong, length=1024 if overlong == "drop" else 200)
        loader = PackedLoader(dataset, global_batch=8, bad=BAD)
        batches = [(shown(batch), batch.left_out) for batch in loader]
        with pytest.raises((ValueError, DataError)) as told:
            list(PackedLoader(dataset, global_batch=8))
        notes = getattr(told.value, "__notes__", [])
        found.append((batches, loader.left_out.samples, repr(told.value), notes))
    assert found[0] == found[1]
    reasons = {each.reason.split(": ")[-1] for each in found[0][1]}
    assert reasons == {"this sample does not fit", "this sample is damaged"}
    assert max(at_once.at_once) > 1


def test_a_shard_that_cannot_be_had_is_waited_for_once(
    dataset_folder: Path, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    store = _WithoutShards(dataset_folder)
    stream, packing = StreamConfig(source=store, local=tmp_path), PackingConfig(packing_length=8192)
    dataset = PackedDataset([stream], processor=chat_processor, packing=packing)
    mixture, settings = Mixture({"": dataset.plan}), LoaderSettings(steps=StepConfig(global_batch=1, world=World()))
    planned = next(StepPlanner(mixture, settings.steps).plan(mixture.start()))
    with pytest.raises(ObjectMissingError, match=r"mds does not exist"):
        list(BatchMaker({"": dataset}, settings).make(planned.work))  # nothing is fetched ahead
    assert len(store.asked) == 1


def test_keys_of_a_sample_are_checked_once(dataset_folder: Path, chat_processor: ChatProcessor) -> None:
    dataset = open_dataset(dataset_folder, _Counts(chat_processor))
    _CountedKeys.num_looks = 0
    batches = list(PackedLoader(dataset, global_batch=8))
    assert _CountedKeys.num_looks == sum(len(batch.sample_ids) for batch in batches)


def test_tokenizers_use_one_thread_in_loader_workers(
    dataset_folder: Path, chat_processor: ChatProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    dataset = open_dataset(dataset_folder, _TellsThreads(chat_processor))
    here, there = (next(iter(PackedLoader(dataset, global_batch=8, num_workers=workers))) for workers in (0, 1))
    assert set(here.labels.unique().tolist()) == {-100, 1}
    assert set(there.labels.unique().tolist()) == {-100, 0}
