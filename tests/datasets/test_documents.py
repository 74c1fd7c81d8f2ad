"""fineweb_edu: documents, cut and packed, from files, shards and the hub's streaming: every token comes once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from lmms_stream.converters.convert import convert
from lmms_stream.datasets import MultiModalDataset, MultiModalIterableDataset
from lmms_stream.errors import DataError
from lmms_stream.types import Batch

from .chats import text_config
from .streamed import Readers

LENGTH, NUM_DOCUMENTS = 64, 320
Tokens = tuple[int, ...]


def document(number: int) -> dict[str, Any]:
    """As the hub has them: beside the text columns that nothing is learnt of."""
    text = " ".join(f"word{number} {at}" for at in range(1 + number * 13 % 40))
    return {"text": text, "id": f"urn:{number}", "dump": "CC", "url": "http://x", "score": 2.5, "token_count": 7}


DOCUMENTS = [document(number) for number in range(NUM_DOCUMENTS)]


def write_hub(folder: Path) -> Path:
    """A local copy of a dataset of the hub: Parquet files in data/, and a card that says how much they hold."""
    (folder / "data").mkdir(parents=True)
    splits = [{"name": "train", "num_bytes": 100_000, "num_examples": NUM_DOCUMENTS}]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'dataset_info': {'splits': splits}})}---\n")
    for part in range(2):
        table = pyarrow.Table.from_pylist(DOCUMENTS[part * 160 : part * 160 + 160])
        pyarrow.parquet.write_table(table, folder / f"data/train-{part:05}-of-00002.parquet", row_group_size=50)
    return folder


def document_config(path: Path | str, tokenizer: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    said = text_config(Path(path), tokenizer, folder / "cache", packing_length=LENGTH, dataset_type="fineweb_edu")
    said |= {"dataset_path": str(path), "dataset_format": "hf_dataset", "num_canonical_nodes": 4}
    return {name: value for name, value in (said | changes).items() if value is not None and name != "packing"}


def pieces_of(batches: list[Batch]) -> Counter[Tokens]:
    """Tokens of each segment."""
    return Counter(
        tuple(batch.input_ids[0, start:stop].tolist())
        for batch in batches
        for start, stop in pairwise(batch.cu_seqlens.tolist())
    )


def expected_pieces(dataset: Any) -> Counter[Tokens]:
    """Of each document its tokens and the end-of-text token, cut."""
    found: Counter[Tokens] = Counter()
    for each in DOCUMENTS:
        tokens = dataset.processor.process({"text": each["text"]})["input_ids"].tolist()
        assert tokens[-1] == dataset.processor.tokenizer.eos_token_id
        found.update(tuple(tokens[at : at + LENGTH]) for at in range(0, len(tokens), LENGTH))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of datasets
@pytest.mark.parametrize("name", ["fineweb_edu", "fineweb_edu_iterable"])
def test_documents_of_the_hub_stream_in_packs_and_no_token_is_lost(name: str, tokenizer: Path, tmp_path: Path) -> None:
    config = document_config(write_hub(tmp_path / "hub"), tokenizer, tmp_path, dataset_type=name)
    first = Readers(config, 2, 1)
    seen = first.take(9)
    seen += Readers(config, 1, 1, state=first.state.to_dict()).rest()
    assert pieces_of(seen) == expected_pieces(first.dataset)
    assert max(batch.num_tokens for batch in seen) == LENGTH
    assert sum(batch.num_tokens for batch in seen) > 0.6 * LENGTH * len(seen), "they share packs"
    assert all((batch.labels[0] >= 0).all() or -100 in batch.labels[0] for batch in seen)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of datasets
def test_documents_are_converted_once_into_the_same_pieces(tokenizer: Path, tmp_path: Path) -> None:
    dataset = MultiModalDataset(document_config(write_hub(tmp_path / "hub"), tokenizer, tmp_path)).build()
    packs = [dataset[number] for number in range(len(dataset))]
    assert pieces_of(packs) == expected_pieces(dataset)
    assert dataset.lengths.sum() > 0.6 * LENGTH * len(dataset)


def test_documents_of_shards_are_read_as_plans_and_as_lanes(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    convert([str(path)], str(tmp_path / "shards"), num_workers=1)
    config = document_config(tmp_path / "shards", tokenizer, tmp_path, dataset_format="mds")
    dataset = MultiModalDataset(config)
    expected = expected_pieces(dataset)
    assert pieces_of([dataset[number] for number in range(len(dataset))]) == expected
    seen: list[Batch] = []
    for batch in MultiModalIterableDataset(config):  # without an end, each lane at its own pace
        seen.append(batch)
        if len(seen) == 3 * len(dataset):
            break
    found = pieces_of(seen)
    assert found.keys() == expected.keys()
    assert max(found.values()) <= 4 * max(expected.values())


def test_rows_without_a_text_are_named(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({"body": "x"}) + "\n")
    config = document_config(path, tokenizer, tmp_path, dataset_format="jsonl")
    with pytest.raises(DataError, match="text"):
        Readers(config, 1, 1).rest()
