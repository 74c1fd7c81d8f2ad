"""Stored datasets: rows by arithmetic -> shards, lengths indexes and processors, as 67b50f60 wrote them.

`write_datasets` writes all of them. `facts_of` reads one with the code of today: what a test compares with what
67b50f60 read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.base import Processor, processor_fingerprint

from .digests import byte_digest, drawn

WORDS = (
    "the", "a", "stream", "of", "packs", "shards", "keeps", "order", "seed", "node", "reads", "writes", "token", "sum",
    "two", "one", "é", "ß", "東京", "🙂", "so",
)  # fmt: skip
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
Row = Mapping[str, Any]


def text_of(number: int, *, most: int) -> str:
    """Return a text of 1 to `most` words, always the same for a number."""
    numbers = drawn(number, most + 1).tolist()
    return " ".join(WORDS[n % len(WORDS)] for n in numbers[: 1 + numbers[-1] % most])


# The processors


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 400 tokens and our chat template, as save_pretrained does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text_of(number, most=60) for number in range(200)], trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    settings = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": int(1e30)}, indent=1))


def write_processors(folder: Path) -> None:
    from ..processors.tiny_sound import save_sound_processor
    from ..processors.tiny_vlm import save_processor

    write_tokenizer(folder / "tokenizer")
    save_processor(folder / "vision", "qwen2_5_vl")
    save_sound_processor(folder / "sound", "qwen2_audio")


# The rows


def chat_rows(first: int, stop: int) -> Iterator[Row]:
    """Yield chats: of two and of more turns, with a system message, with tools and calls of them."""
    for number in range(first, stop):
        messages: list[dict[str, Any]] = []
        if number % 5 == 0:
            messages.append({"role": "system", "content": text_of(number + 900, most=6)})
        for turn in range(1 + number % 3):
            messages.append({"role": "user", "content": text_of(10 * number + turn, most=12)})
            messages.append({"role": "assistant", "content": text_of(10 * number + turn + 5, most=30)})
        row: dict[str, Any] = {"messages": messages}
        if number % 7 == 3:
            arguments = {"values": [number, 2**60 + number, 0.1], "name": "ü"}
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            messages[-1]["tool_calls"] = [call]
            messages += [{"role": "tool", "content": "12"}, {"role": "assistant", "content": "twelve"}]
            row["tools"] = TOOLS
        yield row


def text_rows() -> Iterator[Row]:
    for number in range(40):
        yield {"text": text_of(3_000 + number, most=50)}


def preference_rows() -> Iterator[Row]:
    for number in range(30):
        yield {
            "prompt": [{"role": "user", "content": text_of(4_000 + number, most=12)}],
            "chosen": [{"role": "assistant", "content": text_of(5_000 + number, most=20)}],
            "rejected": [{"role": "assistant", "content": text_of(6_000 + number, most=20)}],
        }


def picture(number: int, form: str) -> bytes:
    """Return an image file of up to 60 pixels a side; JPEG of one color a block of 8, small in bytes."""
    from PIL import Image

    width, height = 20 + (17 * number) % 41, 20 + (29 * number) % 41
    y, x = np.mgrid[0:height, 0:width] // 8
    pixels = np.stack([(x * 40 + number * 9) % 256, (y * 50) % 256, (x * y * 20 + number) % 256], -1).astype(np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, format=form)
    return buffer.getvalue()


def media_rows(name: str, data: Callable[[int], bytes], placeholder: str) -> Iterator[Row]:
    """Yield chats with no, one or two media of a kind."""
    for number in range(24):
        media = [data(3 * number + at) for at in range((1, 2, 0, 1)[number % 4])]
        question = placeholder * len(media) + text_of(7_000 + number, most=8)
        yield {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": text_of(8_000 + number, most=10)},
            ],
            name: media,
        }


def sound(number: int) -> bytes:
    """Return a sound file of 0.1 s or more, 16-bit, as WAV or FLAC."""
    import soundfile

    rate = 8_000
    seconds = 0.1 + (number % 5) / 20
    wave = np.sin(np.arange(int(rate * seconds)) * (0.05 + number / 400)) * 9_000
    buffer = BytesIO()
    soundfile.write(buffer, wave.astype(np.int16), rate, format=("FLAC", "WAV")[number % 2], subtype="PCM_16")
    return buffer.getvalue()


def generation_rows() -> Iterator[Row]:
    for number in range(20):
        yield {"image": picture(number, ("PNG", "JPEG")[number % 2]), "label": number % 4}


# The datasets. name -> settings of the processor (folders below processors/), options of convert, rows

CHAT = {"tokenizer": "tokenizer"}
TOKENS = {"type": "tokens"}
VISION = {"type": "vision", "path": "vision"}
SOUND = {"type": "audio", "path": "sound"}
IMAGE = {"type": "image", "image_size": 16}
RUNS = ("numbers", "others")  # tokens below 64, for tiny models

PROCESSORS: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "chat_last": CHAT | {"learn": "last"},
    "grown": CHAT,
    "compressed": CHAT,
    "text": {"type": "text", "tokenizer": "tokenizer", "text_prefix": "<|system|>", "text_suffix": "<|end|>"},
    "tokens": TOKENS,
    "documents": TOKENS | {"isolate_documents": True},
    "preference": {"type": "preference", "tokenizer": "tokenizer"},
    "images": VISION,
    "sounds": SOUND,
    "generation": IMAGE,
    "numbers": TOKENS,
    "others": TOKENS,
}
FOLDERS = {"chat_last": "chat"}  # the same shards, read by another processor of equal lengths


def processor_of(name: str, processors: Path) -> Processor:
    """Return the processor of a stored dataset; processors: the folder of the stored processors."""
    settings = dict(PROCESSORS[name])
    for key in ("tokenizer", "path"):
        if key in settings:
            settings[key] = str(processors / settings[key])
    return ProcessorConfig(**settings).build()


def set_source_times(root: Path) -> None:
    """Give the files of sources/ the time of modification that states of LMMS Engine's readers know them by."""
    for file in (root / "sources").iterdir():
        os.utime(file, (1_795_000_000, 1_795_000_000))


def write_datasets(root: Path) -> None:
    """Write processors/ and datasets/ below a folder."""
    from lmms_stream.converters.append import append
    from lmms_stream.converters.convert import convert

    processors, datasets = root / "processors", root / "datasets"
    write_processors(processors)

    def write(name: str, rows: Any, **options: Any) -> None:
        settings: dict[str, Any] = {"num_workers": 1, "shard_bytes": 2_048, "processor": processor_of(name, processors)}
        convert(rows, str(datasets / name), **{**settings, **options})

    sources = root / "sources"
    sources.mkdir()
    for number, (first, stop) in enumerate(((0, 30), (30, 48))):
        file = sources / f"chats-{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(first, stop)), encoding="utf-8")
    set_source_times(root)
    write("chat", [sources / "chats-0.jsonl"])
    write("grown", [sources / "chats-0.jsonl"])
    grown: dict[str, Any] = {"num_workers": 1, "shard_bytes": 2_048, "processor": processor_of("grown", processors)}
    append([sources / "chats-1.jsonl"], str(datasets / "grown"), **grown)
    write("compressed", [list(chat_rows(100, 140))], compression="zstd:7")
    write("text", [list(text_rows())])
    chats = processor_of("chat", processors)
    write("tokens", [list(chat_rows(200, 240))], tokenize=True, processor=chats)
    write("documents", [list(text_rows())], tokenize=True, processor=processor_of("text", processors), concat=96)
    write("preference", [list(preference_rows())])
    pictures = media_rows("images", lambda n: picture(n, ("PNG", "JPEG")[n % 2]), "<image>")
    write("images", [list(pictures)], shard_bytes=8_192)
    write("sounds", [list(media_rows("audios", sound, "<audio>"))], shard_bytes=32_768)
    write("generation", [list(generation_rows())], shard_bytes=4_096, kind="image")
    _write_mosaic(datasets)
    _measure(root)


def _write_mosaic(datasets: Path) -> None:
    """Write datasets by MosaicML's MDSWriter: tokens for runs, and a column of each of many encodings."""
    from streaming import MDSWriter

    columns = {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"}
    for name, count, seed in (("numbers", 90, 1), ("others", 60, 2)):
        lengths = 5 + (drawn(seed, count) % np.uint64(28)).astype(np.int64)
        with MDSWriter(columns=columns, out=str(datasets / name), hashes=["xxh3_64"], size_limit=2_048) as writer:
            for number, length in enumerate(lengths.tolist()):
                tokens = (drawn(1_000 * seed + number, length) % np.uint64(64)).astype(np.int32)
                writer.write({"input_ids": tokens, "loss_spans": np.array([[length // 3, length]], np.int32)})
    columns = {
        "int": "int", "uint8": "uint8", "int64": "int64", "float32": "float32", "str": "str", "str_int": "str_int",
        "bytes": "bytes", "json": "json", "array": "ndarray", "shaped": "ndarray:int16:2,3", "png": "png",
    }  # fmt: skip
    from PIL import Image

    with MDSWriter(
        columns=columns, out=str(datasets / "mosaic"), hashes=["sha1", "xxh64"], size_limit=4_096, compression="bz2:9"
    ) as writer:
        for number in range(40):
            writer.write({
                "int": number - 20, "uint8": number * 6, "int64": number << 40, "float32": np.float32(number / 8),
                "str": text_of(number, most=9), "str_int": 10 ** (number % 30), "bytes": bytes(range(number)),
                "json": {"n": [number, None, text_of(number, most=2)]},
                "array": np.arange(number % 5 + 1, dtype=np.uint16).reshape(-1, 1),
                "shaped": np.arange(number, number + 6, dtype=np.int16).reshape(2, 3),
                "png": Image.open(BytesIO(picture(number % 3, "PNG"))),
            })  # fmt: skip


def _measure(root: Path) -> None:
    """Write the lengths indexes that conversions did not write."""
    from lmms_stream.mds.measuring import index_dataset

    for name in RUNS:
        index_dataset(str(root / "datasets" / name), processor_of(name, root / "processors"), num_workers=1)


# The facts of a stored dataset


def open_stored(name: str, root: Path, **settings: Any) -> PackedDataset:
    """Open a stored dataset for packs of 320 tokens (128 in runs), shuffled in small blocks."""
    packing = PackingConfig(packing_length=128 if name in RUNS else 320, window=16, overlong="drop")
    order = OrderConfig(seed=3, num_canonical_nodes=2, shuffle_block_size=16)
    defaults = {"processor": processor_of(name, root / "processors"), "packing": packing, "order": order}
    folder = root / "datasets" / FOLDERS.get(name, name)
    return PackedDataset(folder, **{**defaults, "packing_mode": "plan", **settings})


def sample_digest(sample: Mapping[str, Any]) -> str:
    """Return a digest of the values of a sample; of a picture its sides and pixels."""
    parts: list[bytes] = []
    for name in sorted(sample):
        value = sample[name]
        if hasattr(value, "getpixel"):
            value = np.asarray(value)
        if isinstance(value, np.ndarray):
            parts.append(f"{name} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            parts.append(f"{name} ".encode() + (value if isinstance(value, bytes) else repr(value).encode()))
    return byte_digest(b"\0".join(parts))


def exact(array: Any) -> dict[str, Any]:
    """Return dtype, shape and digest of an array of integers."""
    values = np.asarray(array)
    return {"dtype": str(values.dtype), "shape": list(values.shape), "digest": byte_digest(values.tobytes())}


def rounded(array: Any) -> dict[str, Any]:
    """Return dtype, shape, and mean, deviation and some values of an array of floats, for a comparison by tolerance."""
    values = np.asarray(array)
    flat = values.reshape(-1).astype(np.float64)
    some = flat[:: max(1, len(flat) // 7)][:8]
    close = [flat.mean(), flat.std(), *some.tolist()] if len(flat) else []
    return {"dtype": str(values.dtype), "shape": list(values.shape), "close": [round(float(n), 5) for n in close]}


def batch_facts(batch: Any) -> dict[str, Any]:
    names = ("input_ids", "labels", "position_ids", "cu_seqlens", "sample_ids", "sequences")
    tensors = {name: getattr(batch, name) for name in names if getattr(batch, name, None) is not None}
    inputs = {name: np.asarray(tensor) for name, tensor in sorted(batch.inputs.items())}
    return {
        "step": batch.step,
        "max_seqlen": int(batch.max_seqlen),
        "num_loss_tokens": int(batch.num_loss_tokens),
        **{name: exact(tensor) for name, tensor in tensors.items()},
        "inputs": {name: (exact if array.dtype.kind in "iub" else rounded)(array) for name, array in inputs.items()},
    }


def facts_of(name: str, root: Path) -> dict[str, Any]:
    """Return what a stored dataset holds: samples, lengths, the processor's fingerprint, and the first batches."""
    dataset = open_stored(name, root)
    assert dataset.processor is not None
    index = dataset.length_index()
    samples = dataset.read(range(dataset.num_samples))
    loader = PackedLoader(dataset, global_batch=2)
    batches = [batch_facts(batch) for batch, _ in zip(loader, range(4), strict=False)]
    return {
        "fingerprint": processor_fingerprint(dataset.processor),
        "samples_per_shard": [int(size) for size in dataset.samples_per_shard],
        "samples": [sample_digest(sample) for sample in samples],
        "lengths": index.lengths.tolist(),
        "patches": None if index.patches is None else index.patches.tolist(),
        "measured": [dataset.processor.measure(sample) for sample in samples],
        "plan": dataset.plan.fingerprint,
        "batches": batches,
    }


def mosaic_facts(root: Path) -> list[str]:
    """Return the digests of the samples that MDSWriter wrote, read by number."""
    dataset = PackedStreamingDataset(root / "datasets" / "mosaic", shuffle=False)
    return [sample_digest(dataset[number]) for number in range(dataset.num_samples)]
