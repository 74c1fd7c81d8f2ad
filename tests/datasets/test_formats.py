"""The same chats in every format are the same samples, in the order of the sources, for both kinds of datasets."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from lmms_stream.converters.convert import convert
from lmms_stream.datasets import MultiModalDataset, MultiModalIterableDataset
from lmms_stream.doors.lmms_engine.datasets.names import BAGEL, TYPES

from ..processors.tile_vlm import save_tile_processor
from ..processors.tiny_vlm import picture, save_processor
from .chats import Row, rows, text_config, write_jsonl

NUM_ROWS = 12
Written = dict[str, Any]  # the fields of a config that name what was written


def as_json(folder: Path) -> Written:
    (folder / "chats.json").write_text(json.dumps(rows(NUM_ROWS)))
    return {"dataset_format": "json", "dataset_path": str(folder / "chats.json")}


def as_jsonl(folder: Path) -> Written:
    return {"dataset_format": "jsonl", "dataset_path": str(write_jsonl(folder / "chats.jsonl", NUM_ROWS))}


def as_folder(folder: Path) -> Written:
    (folder / "chats").mkdir()
    write_jsonl(folder / "chats" / "all.jsonl", NUM_ROWS)
    return {"dataset_format": "jsonl", "dataset_path": str(folder / "chats")}


def as_csv(folder: Path) -> Written:
    with (folder / "chats.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages"])
        writer.writerows([json.dumps(row["messages"])] for row in rows(NUM_ROWS))
    return {"dataset_format": "csv", "dataset_path": str(folder / "chats.csv")}


def as_arrow(folder: Path) -> Written:
    table = pyarrow.Table.from_pylist(rows(NUM_ROWS))
    with pyarrow.OSFile(str(folder / "chats.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return {"dataset_format": "arrow", "dataset_path": str(folder / "chats.arrow")}


def as_parquet(folder: Path) -> Written:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(NUM_ROWS)), folder / "chats.parquet")
    return {"dataset_format": "parquet", "dataset_path": str(folder / "chats.parquet")}


def as_hub(folder: Path) -> Written:
    """A local copy of a dataset of the hub: a folder that `datasets` saved."""
    datasets.Dataset.from_list(rows(NUM_ROWS)).save_to_disk(folder / "saved")
    return {"dataset_format": "hf_dataset", "dataset_path": str(folder / "saved")}


def as_stream_of_the_hub(folder: Path) -> Written:
    path = f"json?data_files={write_jsonl(folder / 'chats.jsonl', NUM_ROWS)}&split=train&streaming=1"
    return {"dataset_format": "hf_dataset", "dataset_path": path}


def as_shards(folder: Path) -> Written:
    convert([str(write_jsonl(folder / "chats.jsonl", NUM_ROWS))], str(folder / "shards"), num_workers=1)
    return {"dataset_format": "mds", "dataset_path": str(folder / "shards")}


def as_list(folder: Path) -> Written:
    entries = _two_files(folder)
    (folder / "list.yaml").write_text(yaml.safe_dump({"datasets": entries}))
    return {"dataset_format": "yaml", "dataset_path": str(folder / "list.yaml")}


def as_inline_list(folder: Path) -> Written:
    return {"dataset_format": "yaml", "datasets": _two_files(folder), "dataset_path": None}


def as_nothing_said(folder: Path) -> Written:
    return as_jsonl(folder) | {"dataset_format": None}


def _two_files(folder: Path) -> list[Row]:
    """As it is usually written, and with names of its own and a row too many, which the list says."""
    made = rows(NUM_ROWS)
    (folder / "first.json").write_text(json.dumps(made[:5]))
    dialogs = [{"dialog": [_tagged(each) for each in row["messages"]]} for row in [*made[5:], made[0]]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(dialogs), folder / "second.parquet")
    return [
        {"path": str(folder / "first.json"), "data_folder": "", "data_type": "json"},
        {
            "path": str(folder / "second.parquet"), "data_folder": str(folder), "data_type": "parquet",
            "columns": {"messages": "dialog"}, "tags": {"role_tag": "who", "content_tag": "says"},
            "limit": NUM_ROWS - 5,
        },
    ]  # fmt: skip


def _tagged(message: Row) -> Row:
    return {"who": message["role"], "says": message["content"]}


def as_dataset_info(folder: Path) -> Written:
    """As LLaMA-Factory describes its files."""
    conversations = [{"conversations": [_tagged(each) for each in row["messages"]]} for row in rows(NUM_ROWS)]
    (folder / "chats.json").write_text(json.dumps(conversations))
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"file_name": "chats.json", "formatting": "sharegpt", "tags": {**tags, "system_tag": "system"}}
    (folder / "dataset_info.json").write_text(json.dumps({"chats": entry}))
    return {"dataset_format": None, "dataset_path": f"{folder}/dataset_info.json#chats"}


WAYS = [
    as_json, as_jsonl, as_folder, as_csv, as_arrow, as_parquet, as_hub, as_stream_of_the_hub, as_list,
    as_inline_list, as_nothing_said, as_shards, as_dataset_info,
]  # fmt: skip


def samples(config: Written) -> list[list[int]]:
    """Tokens of each sample, by its number."""
    dataset = MultiModalDataset(config).build()
    found = [
        (dataset[number].sample_ids.tolist(), dataset[number].input_ids[0].tolist()) for number in range(len(dataset))
    ]
    return [tokens for _, tokens in sorted(found)]


def streamed_samples(config: Written) -> list[list[int]]:
    """The same of a MultiModalIterableDataset: one lane, in the order of the source."""
    dataset = MultiModalIterableDataset(config | {"shuffle": False, "num_canonical_nodes": 1, "cache_dir": None})
    batches = list(islice(dataset, NUM_ROWS) if dataset.is_shards else dataset)  # lanes of shards have no end
    return [batch.input_ids[0].tolist() for batch in batches]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of datasets
@pytest.mark.parametrize("write", WAYS, ids=lambda write: write.__name__)
def test_chats_are_the_same_samples_in_every_format_converted_and_streamed(
    write: Callable[[Path], Written], tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "expected").mkdir()
    unpacked = text_config(tmp_path, tokenizer, tmp_path / "cache", packing=False)
    expected = samples(unpacked | as_jsonl(tmp_path / "expected"))
    assert len(expected) == NUM_ROWS
    written = unpacked | write(tmp_path)
    assert samples(written) == expected
    assert streamed_samples(written) == expected


READS_PICTURES = [name for name, each in TYPES.items() if each.kind == "messages" and not name.startswith(BAGEL)]


@pytest.mark.parametrize("name", READS_PICTURES)
def test_pictures_of_a_column_and_beside_the_file_are_the_same_samples(name: str, tmp_path: Path) -> None:
    family = "qwen3_vl" if name.startswith("qwen3") else "qwen2_5_vl"
    if name.startswith("llava"):
        family = "llava_video"
        save_tile_processor(tmp_path / "processor", "llava_onevision")
    else:
        save_processor(tmp_path / "processor", family)
    data = [picture(40 + 8 * number, 60, seed=number) for number in range(4)]
    (tmp_path / "images").mkdir()
    beside, within = [], []
    for number, each in enumerate(data):
        (tmp_path / "images" / f"{number}.png").write_bytes(each)
        text, answer = {"type": "text", "text": "What is it?"}, {"role": "assistant", "content": f"Number {number}."}
        url = {"type": "image_url", "image_url": {"url": f"{number}.png"}}
        beside.append({"messages": [{"role": "user", "content": [url, text]}, answer]})
        asked = {"role": "user", "content": "<image>What is it?"}
        within.append({"messages": [asked, answer], "image": {"bytes": each, "path": None}})
    (tmp_path / "beside.json").write_text(json.dumps(beside))
    features = datasets.Features({
        "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        "image": datasets.Image(),
    })  # fmt: skip
    datasets.Dataset.from_list(within, features=features).save_to_disk(tmp_path / "saved")
    config = {
        "dataset_type": name, "dataset_format": "yaml", "cache_dir": str(tmp_path / "cache"), "packing": False,
        "processor_config": {"processor_name": str(tmp_path / "processor"), "processor_type": family},
        "datasets": [
            {"path": str(tmp_path / "beside.json"), "data_folder": str(tmp_path / "images"), "data_type": "json"},
            {"path": str(tmp_path / "saved"), "data_folder": None, "data_type": "hf_dataset"},
        ],
    }  # fmt: skip
    found = samples(config)
    assert found[:4] == found[4:]
    dataset = MultiModalDataset(config)
    batches = [dataset[number] for number in range(len(dataset))]
    sizes = "image_sizes" if family == "llava_video" else "image_grid_thw"
    assert {"pixel_values", sizes} <= {*batches[0].inputs}
    largest = max(
        sum(each.nbytes for each in (batch.input_ids, batch.labels, batch.position_ids, batch.inputs["pixel_values"]))
        for batch in batches
    )
    assert dataset.estimate_memory().largest_pack == largest


@pytest.mark.parametrize("packing", [True, False])
def test_documents_are_cut_into_packs(packing: bool, tokenizer: Path, tmp_path: Path) -> None:
    texts = ["one two three " * 60, "four", "five six " * 20]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    said = text_config(tmp_path / "texts.jsonl", tokenizer, tmp_path / "cache", packing_length=32, packing=packing)
    dataset = MultiModalDataset(said | {"dataset_type": "fineweb_edu"}).build()
    assert dataset.lengths.max() <= 32
    assert dataset.lengths.sum() == dataset.core.length_index().lengths.sum()
