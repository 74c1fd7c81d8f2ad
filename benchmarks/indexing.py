"""Claims: `index` measures chats with an image each at 0.7 of the speed at which their tokenizer alone encodes the same
texts in batches; what an image adds takes at most 3 microseconds.

The chats are those of Python's documented functions (`build_corpus` of the demo), over and over, each with an image
before its question, of a size of its own. Images are measured by the sizes that are stored beside them, so the bytes
are always those of one small JPEG. Beside `index`, in one process on one core: the fast tokenizer's encode_batch_fast
of the rendered chats, 1000 at a time, and the same for captions of a few words, where all that is not the tokenizer
weighs most (no claim). Rates are of CPU time.

"What an image adds" is reading its stored size and counting its tokens and patches, over and over.

    python benchmarks/indexing.py
    python benchmarks/indexing.py --images 10000
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from measure import in_fresh_process, keep_to_one_core, print_table, verdict

MIN_SHARE, MAX_MICROSECONDS = 0.7, 3.0
SHARD_BYTES = 1 << 26
BATCH = 1000  # texts
ROUNDS = 5  # of what an image adds


def conversations(corpus: Path) -> Iterator[list[dict[str, Any]]]:
    for line in corpus.open("rb"):
        yield json.loads(line)["messages"]


def captions(corpus: Path) -> Iterator[list[dict[str, Any]]]:
    """The first eight words that each chat's assistant says, with nothing asked but the image."""
    for messages in conversations(corpus):
        answer = next(each["content"] for each in messages if each["role"] == "assistant")
        yield [
            {"role": "user", "content": "Describe the image."},
            {"role": "assistant", "content": " ".join(answer.split()[:8])},
        ]


def with_images(chats: Iterable[list[dict[str, Any]]], count: int, num_bytes: int) -> Iterator[list[dict[str, Any]]]:
    """count chats with an image each, before the user's first text."""
    for number, messages in enumerate(itertools.islice(itertools.cycle(chats), count)):
        size = {"width": 300 + 7 * number % 1201, "height": 200 + 11 * number % 997}
        part = {"type": "image", "mime": "image/jpeg", "span": [0, num_bytes], **size}
        first = next(index for index, each in enumerate(messages) if each["role"] == "user")
        seen = {**messages[first], "content": [part, {"type": "text", "text": messages[first]["content"]}]}
        yield [*messages[:first], seen, *messages[first + 1 :]]


def write_dataset(folder: Path, chats: Iterable[list[dict[str, Any]]], count: int) -> None:
    from PIL import Image
    from streaming import MDSWriter

    buffer = BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG")
    media = buffer.getvalue()
    columns = {"messages": "str", "media": "bytes"}
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], size_limit=SHARD_BYTES) as writer:
        for messages in with_images(chats, count, len(media)):
            writer.write({"messages": json.dumps(messages), "media": media})


def write_datasets(folder: Path, count: int) -> None:
    from lmms_stream.tools.demo.corpus import build_corpus
    from lmms_stream.tools.demo.vision import save_processor

    corpus = build_corpus(folder / "corpus")
    save_processor(folder / "processor", texts=corpus.texts)
    write_dataset(folder / "conversations", conversations(corpus.functions), count)
    write_dataset(folder / "captions", captions(corpus.functions), count)


# What is timed, each in a process of its own


def cpu_seconds_of(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def index(folder: Path, name: str) -> tuple[float, int]:
    """Seconds, and tokens of texts and images."""
    from lmms_stream.mds.measuring import index_dataset
    from lmms_stream.processors.multimodal import MultimodalProcessor

    processor = MultimodalProcessor.from_pretrained(str(folder / "processor"))
    lengths: list[Any] = []
    seconds = cpu_seconds_of(lambda: lengths.append(index_dataset(str(folder / name), processor, num_workers=1)))
    return seconds, int(lengths[0].lengths.sum())


def encode(folder: Path, name: str) -> tuple[float, int]:
    """Seconds, and tokens of the texts alone."""
    from lmms_stream.mds.packed import PackedStreamingDataset
    from transformers import AutoProcessor

    tokenizer = AutoProcessor.from_pretrained(str(folder / "processor")).tokenizer
    dataset = PackedStreamingDataset(folder / name, folder / f"cache-{name}")
    texts = [
        tokenizer.apply_chat_template(json.loads(sample["messages"]), tokenize=False) for sample in iter_stored(dataset)
    ]
    num_tokens = 0

    def run() -> None:
        nonlocal num_tokens
        for first in range(0, len(texts), BATCH):
            batch = tokenizer.backend_tokenizer.encode_batch_fast(
                texts[first : first + BATCH], add_special_tokens=False
            )
            num_tokens += sum(len(each) for each in batch)

    return cpu_seconds_of(run), num_tokens


def iter_stored(dataset: Any) -> Iterator[Any]:
    """All samples in stored order."""
    return (dataset[number] for number in range(len(dataset)))


def microseconds_of_an_image(folder: Path) -> float:
    from lmms_stream.processors.media.facts import stored_facts
    from lmms_stream.processors.multimodal import MultimodalProcessor

    family = MultimodalProcessor.from_pretrained(str(folder / "processor")).family
    chats = with_images(conversations(folder / "corpus" / "functions.jsonl"), BATCH * 10, 1)
    parts = [messages[0]["content"][0] for messages in chats if isinstance(messages[0]["content"], list)]

    def measure() -> None:
        for part in parts:
            facts = stored_facts(part)
            assert facts is not None
            family.layout("image", facts)

    return min(cpu_seconds_of(measure) for _ in range(ROUNDS)) / len(parts) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where datasets are written; default: the temporary folder")
    args = parser.parse_args()
    keep_to_one_core()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        os.environ["TMPDIR"] = name
        in_fresh_process(write_datasets, folder, args.images)
        rows, shares = [], []
        for dataset in ("conversations", "captions"):
            (measured, tokens), _ = in_fresh_process(index, folder, dataset)
            (encoded, of_texts), _ = in_fresh_process(encode, folder, dataset)
            shares.append(encoded / measured)
            rows.append(
                [
                    dataset, f"{of_texts / args.images:.0f}", f"{tokens / args.images:.0f}",
                    f"{args.images / measured:,.0f}", f"{args.images / encoded:,.0f}", f"{shares[-1]:.2f}",
                ]
            )  # fmt: skip
        columns = ["", "tokens of text", "with images", "index, chats/s", "tokenizer alone", "share"]
        print_table(f"{args.images:,} chats with an image each, one core, seconds of CPU", columns, rows)
        added, _ = in_fresh_process(microseconds_of_an_image, folder)
    share = shares[0]
    print(f"at least {MIN_SHARE} of the tokenizer's speed: {verdict(share >= MIN_SHARE)} ({share:.2f})")
    print(f"an image adds at most {MAX_MICROSECONDS:.0f} us: {verdict(added <= MAX_MICROSECONDS)} ({added:.2f})")


if __name__ == "__main__":
    main()
