"""A processor of chats with pictures and films, whose text takes a token a word, and datasets of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lmms_stream.errors import DataError
from lmms_stream.processors.base import FactsMissingError, Measured
from lmms_stream.processors.media.facts import media_part
from lmms_stream.types import Processed, Sample
from streaming import MDSWriter

COLUMNS = {"messages": "str", "media": "bytes"}
MERGED = 4  # patches of a token


class MediaWords:
    """An image of 28 w x 28 h pixels gives 4 w h patches and w h tokens; each frame of a video as much again.

    For parts without facts, the bytes say their sizes: a header of an image, or WIDTHxHEIGHTxFRAMES.
    """

    columns = ("messages", "media")
    measured_columns = ("messages",)
    schema = "messages"

    def __init__(self) -> None:
        self.num_measured_whole = 0

    @property
    def description(self) -> Mapping[str, Any]:
        return {"class": type(self).__name__, "version": 1}

    def measure(self, sample: Sample) -> int:
        (found,) = self.measure_media([sample])
        if isinstance(found, DataError):
            raise found
        return found.tokens

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        return [self._measured(sample) for sample in samples]

    def _measured(self, sample: Sample) -> Measured | DataError:
        words, tokens = 0, {"image": 0, "video": 0, "audio": 0}
        self.num_measured_whole += "media" in sample
        try:
            for part in self._parts(sample):
                if part["type"] == "text":
                    words += len(part["text"].split())
                else:
                    tokens[part["type"]] += self._patches(part, sample) // MERGED
        except DataError as error:
            return error
        num_patches = MERGED * sum(tokens.values())
        return Measured(words + sum(tokens.values()), num_patches, *tokens.values())

    @staticmethod
    def _parts(sample: Sample) -> list[dict[str, Any]]:
        contents = [message["content"] for message in json.loads(sample["messages"])]
        lists = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents]
        return [part for content in lists for part in content]

    @staticmethod
    def _patches(part: dict[str, Any], sample: Sample) -> int:
        width: int | None
        height: int | None
        frames: int
        width, height, frames = part.get("width"), part.get("height"), part.get("frames", 1)
        if width is None or height is None:
            if "media" not in sample:
                raise FactsMissingError(f"a part of type {part['type']!r} has no width and height")
            stored = media_part(part, sample["media"])
            if stored.image_size is not None:
                width, height = stored.image_size
            else:
                width, height, frames = map(int, stored.data.split(b"x"))
        if width < 28 or height < 28:
            raise DataError(f"an image of {width}x{height} pixels is too small: leave it out")
        return MERGED * (width // 28) * (height // 28) * frames

    def process(self, sample: Sample) -> Processed:
        ids = np.arange(self.measure(sample), dtype=np.int64)
        return {"input_ids": ids, "labels": ids.copy()}


def chat(words: int, sizes: Sequence[tuple[int, int, int]] = (), *, facts: bool = True) -> dict[str, Any]:
    """A stored chat of so many words with images (of one frame) and videos of these widths, heights and frames."""
    content: list[dict[str, Any]] = []
    media = b""
    for width, height, frames in sizes:
        data = f"{width}x{height}x{frames}".encode()
        kind, mime = ("image", "image/png") if frames == 1 else ("video", "video/mp4")
        part = {"type": kind, "mime": mime, "span": [len(media), len(data)]}
        of_video = {"frames": frames, "fps": 2.0} if frames > 1 else {}
        content.append(part | ({"width": width, "height": height, **of_video} if facts else {}))
        media += data
    content.append({"type": "text", "text": " ".join(["word"] * words)})
    return {"messages": json.dumps([{"role": "user", "content": content}]), "media": media}


def write_chats(folder: Path, samples: Sequence[Mapping[str, Any]], *, size_limit: int = 1 << 12) -> Path:
    """A plain MDS dataset of stored chats."""
    with MDSWriter(columns=COLUMNS, out=str(folder), size_limit=size_limit, hashes=["xxh3_64"]) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return folder


def mixed_chats(count: int, *, seed: int = 0, facts: bool = True) -> list[dict[str, Any]]:
    """Texts, chats with one image, with ten, and with a video, in turn as a seed draws them."""
    draws = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        frames, num_media = [(1, 0), (1, 1), (1, 10), (int(draws.integers(2, 6)), 1)][draws.integers(4)]
        sizes = [(28 * int(w), 28 * int(h), frames) for w, h in draws.integers(1, 5, size=(num_media, 2))]
        samples.append(chat(int(draws.integers(1, 60)), sizes, facts=facts))
    return samples
