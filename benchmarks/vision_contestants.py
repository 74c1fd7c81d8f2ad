"""Who vision.py compares: each is given a Job, prepares itself, and returns what gives the batches of an epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from photographs import chat, stored_chats

WORKERS = 2
BATCH = 4  # chats


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An epoch of so many chats. folder: of the dataset, or its URL; cache: where shards of a URL are kept."""

    folder: str
    processor: str
    max_pixels: int
    chats: int
    cache: str = ""


Batches = Iterable[tuple[int, int]]  # tokens and patches of each batch
Contestant = Callable[[Job], Callable[[], Batches]]  # what is timed is what it returns


# Ours


def ours(job: Job) -> Callable[[], Batches]:
    from lmms_stream.loader.loader import PackedLoader
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig

    processor, length = our_processor(job)

    def batches() -> Iterator[tuple[int, int]]:
        packing = PackingConfig(packing_length=BATCH * length)
        cache = job.cache or f"{job.folder}-cache"
        dataset = PackedStreamingDataset(job.folder, cache, processor=processor, packing=packing)
        for batch in PackedLoader(dataset, global_batch=BATCH, num_workers=WORKERS):
            yield batch.num_tokens, len(batch.inputs["pixel_values"])

    return batches


def our_processor(job: Job) -> tuple[Any, int]:
    """The processor, and the tokens of each chat; it has compiled what it needs."""
    from lmms_stream.processors.multimodal import MultimodalProcessor

    processor = MultimodalProcessor.from_pretrained(job.processor, image_max_pixels=job.max_pixels)
    (sample,) = stored_chats(1)
    return processor, len(processor.process(sample)["input_ids"])


# The same samples and the same processor behind other datasets


class Processed:
    """What the peers' datasets call for a sample."""

    def __init__(self, processor: Any):
        self._processor = processor

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        return self._processor.process(sample)


def joined(samples: list[Any]) -> Any:
    from lmms_stream.loader.collate import collate

    return collate(samples, [0] * len(samples))


def counted(loader: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for batch in loader:
        yield batch.num_tokens, len(batch.inputs["pixel_values"])


def by_litdata(job: Job) -> Callable[[], Batches]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    processed = Processed(our_processor(job)[0])

    def batches() -> Batches:
        options: dict[str, Any] = {}
        if job.cache:
            downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it refuses a server without TLS otherwise
            options = {"cache_dir": job.cache, "storage_options": {"endpoint_url": os.environ["S3_ENDPOINT_URL"]}}
        dataset = StreamingDataset(job.folder, shuffle=True, transform=processed, **options)
        return counted(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=joined))

    return batches


def by_mosaicml(job: Job) -> Callable[[], Batches]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    processed = Processed(our_processor(job)[0])

    class Dataset(StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            return processed(super().__getitem__(index))

    def batches() -> Batches:
        remote = {"remote": job.folder, "local": job.cache} if job.cache else {"local": job.folder}
        dataset = Dataset(**remote, shuffle=True, batch_size=BATCH)
        for stream in dataset.streams:  # or workers that are forked share its connection, and get each other's shards
            stream._downloader.clean_up()
        return counted(DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=joined))

    return batches


# transformers' processor


class Files:
    """Chats and their images, opened and decoded when they are asked for; as map-style datasets are."""

    def __init__(self, folder: str, count: int):
        self._folder, self._count = folder, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, Any]:
        from PIL import Image

        return number, Image.open(Path(self._folder, f"{number:06d}.jpg")).convert("RGB")


class Arrow:
    """The same of `datasets`."""

    def __init__(self, folder: str):
        from datasets import load_from_disk

        self._rows = load_from_disk(folder)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        row = self._rows[number]
        return row["number"], row["image"].convert("RGB")


class ByTransformers:
    """Chats and images -> a batch, as examples of transformers do it; labels are what is no padding and no image."""

    def __init__(self, processor: Any):
        self.processor = processor

    def __call__(self, chats: list[tuple[int, Any]]) -> Any:
        texts = [
            self.processor.apply_chat_template(chat(number, {"type": "image"}), tokenize=False) for number, _ in chats
        ]
        batch = self.processor(text=texts, images=[image for _, image in chats], padding=True, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[(batch["attention_mask"] == 0) | (labels == self.processor.image_token_id)] = -100
        batch["labels"] = labels
        return dict(batch)


def by_transformers(job: Job, *, of_files: bool, use_fast: bool) -> Callable[[], Batches]:
    from torch.utils.data import DataLoader
    from transformers import AutoProcessor

    limits = {"max_pixels": job.max_pixels, "min_pixels": 56 * 56}
    collated = ByTransformers(AutoProcessor.from_pretrained(job.processor, use_fast=use_fast, **limits))

    def batches() -> Iterator[tuple[int, int]]:
        dataset: Any = Files(job.folder, job.chats) if of_files else Arrow(job.folder)
        for batch in DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=collated):
            yield int(batch["attention_mask"].sum()), len(batch["pixel_values"])

    collated([(Files(job.folder, 1) if of_files else Arrow(job.folder))[0]])
    return batches
