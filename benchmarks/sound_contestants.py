"""Who sound.py compares: each is given a Job, prepares itself, and returns what gives the batches of an epoch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from recordings import NUM_CHOSEN, NUM_FRAMES, RATE, SETTINGS, chat, path_of

WORKERS = 2
BATCH = 4  # chats


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An epoch of so many chats with a recording. folder: of shards or of files. packing_length: of our packs."""

    kind: str
    folder: str
    processor: str
    chats: int
    packing_length: int
    cache: str = ""  # see vision.measured: there is none


Batches = Iterable[tuple[int, int]]  # tokens of each batch, and rows that a tower reads: patches and frames of sound
Contestant = Callable[[Job], Callable[[], Batches]]  # what is timed is what it returns


def num_rows(inputs: Mapping[str, Any]) -> int:
    count = len(inputs["pixel_values_videos"]) if "pixel_values_videos" in inputs else 0
    if "audio_frames" in inputs:
        count += len(inputs["audio_frames"])
    if "feature_attention_mask" in inputs:
        count += int(inputs["feature_attention_mask"].sum())
    return count


# Ours


def our_loader(job: Job, *, num_workers: int = WORKERS, endless: bool = False) -> Any:
    from lmms_stream.loader.loader import SOURCE, PackedLoader
    from lmms_stream.mds.packed import PackedStreamingDataset
    from lmms_stream.plan.packing import PackingConfig

    packing = PackingConfig(packing_length=job.packing_length)
    dataset = PackedStreamingDataset(
        job.folder, f"{job.folder}-cache", processor=our_processor(job.kind, job.processor), packing=packing
    )
    weights = {SOURCE: 1.0} if endless else None
    return PackedLoader(dataset, global_batch=1, num_workers=num_workers, weights=weights)


def our_processor(kind: str, path: str) -> Any:
    from lmms_stream.processors.multimodal import MultimodalProcessor

    return MultimodalProcessor.from_pretrained(path, **SETTINGS[kind])


def ours(job: Job) -> Callable[[], Batches]:
    from lmms_stream.mds.packed import PackedStreamingDataset

    processor = our_processor(job.kind, job.processor)
    stored = PackedStreamingDataset(job.folder, f"{job.folder}-cache", processor=processor)
    processor.process(stored[0])  # compiles what it needs

    def batches() -> Iterator[tuple[int, int]]:
        for batch in our_loader(job):
            yield batch.num_tokens, num_rows(batch.inputs)

    return batches


# transformers' processor


class Files:
    """Chats and their recordings, read and decoded when they are asked for; as map-style datasets are."""

    def __init__(self, job: Job):
        self._job = job

    def __len__(self) -> int:
        return self._job.chats

    def __getitem__(self, number: int) -> tuple[int, Any, Any]:
        path = path_of(Path(self._job.folder), self._job.kind, number)
        frames = None if self._job.kind == "sound" else frames_of(path)
        return number, frames, None if self._job.kind == "video" else sound_of(path)


def frames_of(path: Path) -> Any:
    """uint8[NUM_CHOSEN, H, W, 3], by transformers' own reading of videos with PyAV."""
    from transformers.video_utils import load_video

    return load_video(str(path), num_frames=NUM_CHOSEN, backend="pyav")[0]


def sound_of(path: Path, rate: int = 16000) -> Any:
    """float32[n] at a rate, of one channel: decoded by soundfile, or PyAV for a video; resampled as librosa does."""
    import soxr

    if path.suffix == ".mp4":
        import av

        with av.open(str(path)) as container:
            own = container.streams.audio[0].rate
            wave = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1).mean(axis=0)
    else:
        import soundfile

        wave, own = soundfile.read(path, dtype="float32")
    return wave if own == rate else soxr.resample(wave, own, rate)


class ByTransformers:
    """Chats and recordings -> a batch, as examples of transformers do it; labels leave out padding and media."""

    def __init__(self, kind: str, processor: Any):
        self._kind, self.processor = kind, processor
        names = ("<|AUDIO|>", "<|VIDEO|>", "<|video_pad|>")
        self._media = [found for found in map(processor.tokenizer.get_vocab().get, names) if found is not None]

    def __call__(self, chats: list[tuple[int, Any, Any]]) -> Any:
        import torch

        part_type = "audio" if self._kind == "sound" else "video"
        template = self.processor.chat_template
        texts = [
            self.processor.tokenizer.apply_chat_template(
                chat(number, {"type": part_type}), tokenize=False, chat_template=template
            )
            for number, _, _ in chats
        ]
        given: dict[str, Any] = {}
        if self._kind != "video":
            given |= {"audio": [sound for _, _, sound in chats], "sampling_rate": 16000}
        if self._kind != "sound":
            given |= {"videos": [frames for _, frames, _ in chats], "do_sample_frames": False}
        if self._kind == "omni":
            given |= {"use_audio_in_video": True, "fps": NUM_CHOSEN * RATE / NUM_FRAMES}
        batch = self.processor(text=texts, padding=True, return_tensors="pt", **given)
        labels = batch["input_ids"].clone()
        labels[(batch["attention_mask"] == 0) | torch.isin(labels, torch.tensor(self._media))] = -100
        batch["labels"] = labels
        return dict(batch)


def by_transformers(job: Job) -> Callable[[], Batches]:
    from torch.utils.data import DataLoader
    from transformers import AutoProcessor

    collated = ByTransformers(job.kind, AutoProcessor.from_pretrained(job.processor))
    files = Files(job)

    def batches() -> Iterator[tuple[int, int]]:
        for batch in DataLoader(files, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=collated):
            yield int(batch["attention_mask"].sum()), num_rows(batch)

    collated([files[0]])
    # What decoded the video is garbage by now. Were it freed in a forked worker, FFmpeg would wait there for its
    # threads, which a fork does not copy.
    gc.collect()
    return batches
