"""A stored dataset as a datasets.IterableDataset."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from datasets import Image, List, Value
from datasets.distributed import split_dataset_by_node
from lmms_stream import MDSWriter
from lmms_stream.doors.huggingface.stored import iterable_dataset
from lmms_stream.errors import ConfigError
from PIL import Image as Picture

COLUMNS = {
    "text": "str", "image": "png", "number": "int", "share": "float32", "half": "float16", "ids": "ndarray:int32",
    "facts": "json", "data": "bytes",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with MDSWriter(out=str(tmp_path / "data"), columns=COLUMNS, size_limit=3000) as writer:
        for number in range(50):
            writer.write(
                {
                    "text": f"text {number}",
                    "image": Picture.new("RGB", (8, 6), (number, 0, 0)),
                    "number": number,
                    "share": np.float32(number / 2),
                    "half": np.float16(number / 2),
                    "ids": np.arange(number % 5 + 1, dtype=np.int32),
                    "facts": {"number": number},
                    "data": bytes([number]),
                }
            )
    return tmp_path / "data"


def test_samples_have_features_and_their_values(folder: Path) -> None:
    dataset = iterable_dataset(folder)
    assert dataset.features == {
        "text": Value("string"),
        "image": Image(),
        "number": Value("int64"),
        "share": Value("float32"),
        "half": Value("float16"),
        "ids": List(Value("int32")),
        "facts": Value("string"),
        "data": Value("binary"),
    }
    assert dataset.num_shards > 2
    samples = list(dataset)
    assert [sample["number"] for sample in samples] == list(range(50))
    assert {**samples[3], "image": samples[3]["image"].getpixel((0, 0))} == {
        "text": "text 3", "image": (3, 0, 0), "number": 3, "share": 1.5, "half": 1.5, "ids": [0, 1, 2, 3],
        "facts": '{"number": 3}', "data": b"\x03",
    }  # fmt: skip


def test_images_keep_their_stored_bytes(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "data"), columns={"one": "jpeg", "all": "list[png]", "raw": "pil"}) as writer:
        picture = Picture.effect_noise((64, 48), 80)
        writer.write({"one": picture, "all": [picture, picture.rotate(90)], "raw": picture})
    (shard,) = (tmp_path / "data").glob("*.mds")
    encoded = Image(decode=False)
    dataset = iterable_dataset(tmp_path / "data")
    (sample,) = dataset.cast_column("one", encoded).cast_column("all", List(encoded))
    files = [each["bytes"] for each in (sample["one"], *sample["all"])]
    assert [file[:4] for file in files] == [b"\xff\xd8\xff\xe0", b"\x89PNG", b"\x89PNG"]
    assert all(file in shard.read_bytes() for file in files)
    assert sample["raw"].tobytes() == picture.tobytes()


def test_a_state_continues_behind_the_last_sample_also_in_other_processes(folder: Path) -> None:
    dataset = iterable_dataset(folder).select_columns("number")
    iterator = iter(dataset)
    read = [next(iterator)["number"] for _ in range(23)]
    again = pickle.loads(pickle.dumps(iterable_dataset(folder).select_columns("number")))
    again.load_state_dict(dataset.state_dict())
    assert [*read, *(sample["number"] for sample in again)] == list(range(50))


def test_nodes_and_shuffles_share_the_samples(folder: Path) -> None:
    dataset = iterable_dataset(folder).select_columns("number")
    parts = [list(split_dataset_by_node(dataset, rank=rank, world_size=2)) for rank in range(2)]
    assert sorted(sample["number"] for part in parts for sample in part) == list(range(50))
    shuffled = [sample["number"] for sample in dataset.shuffle(seed=1, buffer_size=5)]
    assert sorted(shuffled) == list(range(50)) != shuffled


def test_a_column_of_arrays_of_any_type_has_no_feature(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "data"), columns={"ids": "ndarray"}) as writer:
        writer.write({"ids": np.arange(3)})
    with pytest.raises(ConfigError, match="of encoding ndarray may hold arrays of any type, and a feature has one"):
        iterable_dataset(tmp_path / "data")
