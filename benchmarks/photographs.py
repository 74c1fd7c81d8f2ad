"""Chats about photographs, as files, MDS shards, an Arrow dataset and litdata's chunks. number -> chat -> [dataset].

All hold the same chats, each with a JPEG of its own: the photograph that matplotlib ships, enlarged and moved a little
further each time. All chats have equally many tokens, so that packs and batches of so many chats hold the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from data import write_litdata
from media import photograph

QUALITY = 90  # of the JPEGs
NUM_DISTINCT = 64  # JPEGs; further chats have them again
WORDS = "Photograph number of the series: who is shown there, and where was it taken? An officer in uniform, by a flag."


def question(number: int) -> str:
    return f"Photograph number {number:06d} of the series: who is shown there, and where was it taken?"


ANSWER = "An officer in uniform, by a flag."


@cache
def jpeg(number: int) -> bytes:
    """Photograph `number` of NUM_DISTINCT."""
    from PIL import Image

    moved = np.roll(np.asarray(photograph()), (7 * number, 13 * number), axis=(0, 1))
    buffer = BytesIO()
    Image.fromarray(moved).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def chat(number: int, image: Any) -> list[dict[str, Any]]:
    """OpenAI's messages, with a part for the image."""
    content = [image, {"type": "text", "text": question(number)}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]


def stored_chats(count: int) -> Iterator[dict[str, Any]]:
    """The chats as our shards store them."""
    from lmms_stream.processors.media.facts import facts_of

    for number in range(count):
        data = jpeg(number % NUM_DISTINCT)
        facts = facts_of(data, "image")
        part = {"type": "image", "mime": "image/jpeg", "span": [0, len(data)], **facts._asdict()}
        yield {"messages": json.dumps(chat(number, part)), "media": data}


def varied_chats(count: int, *, sides: tuple[int, int], answers: Sequence[int], seed: int = 0) -> Iterator[Any]:
    """Chats as our shards store them, with windows of the photograph, each side from the first of `sides` to below the
    second, and answers of so many words, in turn.
    """
    from lmms_stream.processors.media.facts import facts_of
    from PIL import Image

    rng = np.random.default_rng([seed, 3])
    pixels, words = np.asarray(photograph()), WORDS.split()
    for number in range(count):
        width, height = rng.integers(*sides, 2)
        left, top = rng.integers(0, pixels.shape[0] - sides[1], 2)
        buffer = BytesIO()
        Image.fromarray(pixels[top : top + height, left : left + width]).save(buffer, "JPEG", quality=QUALITY)
        data = buffer.getvalue()
        part = {"type": "image", "mime": "image/jpeg", "span": [0, len(data)], **facts_of(data, "image")._asdict()}
        asked = {"role": "user", "content": [part, {"type": "text", "text": "What is shown there?"}]}
        answer = " ".join(rng.choice(words, answers[number % len(answers)]))
        yield {"messages": json.dumps([asked, {"role": "assistant", "content": answer}]), "media": data}


def write_mds(folder: Path, samples: Iterable[Mapping[str, Any]], *, shard_bytes: int) -> None:
    from lmms_stream import MDSWriter

    columns = {"messages": "str", "media": "bytes"}
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=shard_bytes) as writer:
        for sample in samples:
            writer.write(sample)


def write_chunks(folder: Path, count: int, *, chunk_bytes: int) -> None:
    """litdata's `optimize` of them; see write_litdata."""
    from functools import partial

    write_litdata(folder, partial(stored_chats, count), chunk_bytes=chunk_bytes)


def write_files(folder: Path, count: int) -> None:
    """A JPEG for each chat."""
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(jpeg(number % NUM_DISTINCT))


def write_arrow(folder: Path, count: int) -> None:
    """A dataset of `datasets` with the feature Image, its bytes within."""
    from datasets import Dataset, Features, Image, Value

    rows = {
        "image": [{"bytes": jpeg(number % NUM_DISTINCT), "path": None} for number in range(count)],
        "number": list(range(count)),
    }
    features = Features({"image": Image(), "number": Value("int32")})
    Dataset.from_dict(rows, features=features).save_to_disk(folder)


def save_tiny_processor(folder: Path) -> Path:
    """A processor of Qwen2.5-VL's; digits are tokens of their own, because no text that it is trained on has any."""
    from lmms_stream.tools.demo.vision import save_processor

    return save_processor(folder, texts=[WORDS] * 8)
