from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import LengthsError
from lmms_stream.mds.lengths import LengthIndex, lengths_names

from ..strategies import examples

FINGERPRINT = "0123abcd"


def written(folder: Path, lengths: list[int]) -> tuple[Path, Path]:
    """An index in `folder`: the paths of its array and of its description."""
    index = LengthIndex.from_array(
        np.array(lengths, np.uint32), fingerprint=FINGERPRINT, processor={"class": "Chat", "max_pixels": 9}
    )
    array_name, description_name = index.write(folder)
    return folder / array_name, folder / description_name


def opened(array: Path, description: Path) -> LengthIndex:
    return LengthIndex.open(array, description.read_bytes(), fingerprint=FINGERPRINT)


@examples(30)
@given(lengths=st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_an_index_comes_back_from_disk_unchanged(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    array, description = written(tmp_path_factory.mktemp("dataset"), lengths)
    index = opened(array, description)
    original = LengthIndex.from_array(np.array(lengths, np.uint32))
    assert index.lengths.tolist() == lengths
    assert index.lengths.dtype == np.uint32
    assert index.fingerprint == FINGERPRINT
    assert index.content_hash == original.content_hash
    assert index.processor == {"class": "Chat", "max_pixels": 9}


def test_an_opened_index_is_memory_mapped_and_cannot_be_written_to(tmp_path: Path) -> None:
    index = opened(*written(tmp_path, [3, 1, 2]))
    assert isinstance(index.lengths, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        index.lengths[0] = 5


def test_an_index_lies_beside_the_shards_as_plain_numpy_and_json(tmp_path: Path) -> None:
    array, description = written(tmp_path, [3, 1, 2])
    names = (f"_lmms/lengths/{FINGERPRINT}.npy", f"_lmms/lengths/{FINGERPRINT}.json")
    assert lengths_names(FINGERPRINT) == names
    assert (array, description) == tuple(tmp_path / name for name in names)
    assert np.load(array).tolist() == [3, 1, 2]
    assert json.loads(description.read_text()) == {
        "version": 1,
        "num_samples": 3,
        "num_tokens": 6,
        "content_hash": LengthIndex.from_array(np.array([3, 1, 2])).content_hash,
        "processor": {"class": "Chat", "max_pixels": 9},
    }


def test_the_number_of_tokens_is_counted_beyond_32_bits(tmp_path: Path) -> None:
    _, description = written(tmp_path, [2**32 - 1] * 4)
    assert json.loads(description.read_text())["num_tokens"] == 4 * (2**32 - 1)


def test_the_content_hash_is_that_of_the_lengths_in_any_dtype() -> None:
    lengths = np.array([3, 1, 2], np.uint32)
    expected = hashlib.blake2b(lengths.astype("<u4").tobytes(), digest_size=16).hexdigest()
    for dtype in (np.uint8, np.int32, np.uint32, np.int64):
        assert LengthIndex.from_array(lengths.astype(dtype)).content_hash == expected
    assert LengthIndex.from_array(lengths[::-1]).content_hash != expected
    assert LengthIndex.from_array(np.array([3, 1, 2, 0])).content_hash != expected


def test_a_strided_array_has_the_hash_of_its_values() -> None:
    lengths = np.arange(10, dtype=np.uint32)
    assert LengthIndex.from_array(lengths[::2]).content_hash == LengthIndex.from_array(lengths[::2].copy()).content_hash


def test_an_index_can_be_written_again(tmp_path: Path) -> None:
    written(tmp_path, [3, 1, 2])
    assert opened(*written(tmp_path, [7, 7])).lengths.tolist() == [7, 7]


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (np.array([3, 1, 2], np.int64), "int64[3]"),
        (np.array([3, 1, 2], np.float32), "float32[3]"),
        (np.array([3, 1], np.uint32), "uint32[2]"),
        (np.array([[3, 1, 2]], np.uint32), "uint32[1, 3]"),
    ],
)
def test_an_array_of_another_dtype_or_size_than_described_is_refused(
    tmp_path: Path, found: np.ndarray[Any, np.dtype[Any]], shown: str
) -> None:
    array, description = written(tmp_path, [3, 1, 2])
    np.save(array, found)
    message = (
        f"lengths index {FINGERPRINT} should be uint32[3], found {shown} at {array}: "
        "write it again with lmms-stream index"
    )
    with pytest.raises(LengthsError, match=f"^{re.escape(message)}$"):
        opened(array, description)


def assert_cannot_be_read(array: Path, description: bytes) -> None:
    start = re.escape(f"lengths index {FINGERPRINT} at {array} cannot be read (")
    with pytest.raises(LengthsError, match=rf"^{start}(?s:.+)\): write it again with lmms-stream index$"):
        LengthIndex.open(array, description, fingerprint=FINGERPRINT)


@pytest.mark.parametrize(
    "description",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b"null", b"{}", b'{"num_samples": 3}', b'{"content_hash": "c"}'],
)
def test_a_corrupt_description_is_refused(tmp_path: Path, description: bytes) -> None:
    array, _ = written(tmp_path, [3, 1, 2])
    with pytest.raises(
        LengthsError,
        match=rf"^the description of lengths index {FINGERPRINT} cannot be read \((?s:.+)\): "
        "write it again with lmms-stream index$",
    ):
        LengthIndex.open(array, description, fingerprint=FINGERPRINT)


def test_a_missing_array_is_refused(tmp_path: Path) -> None:
    array, description = written(tmp_path, [3, 1, 2])
    array.unlink()
    assert_cannot_be_read(array, description.read_bytes())


@pytest.mark.parametrize("kept_bytes", [4, 40, 128, 136])
def test_an_array_that_was_cut_short_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    array, description = written(tmp_path, [3, 1, 2])
    array.write_bytes(array.read_bytes()[:kept_bytes])
    assert_cannot_be_read(array, description.read_bytes())


def test_an_array_of_pickled_objects_is_refused(tmp_path: Path) -> None:
    array, description = written(tmp_path, [3, 1, 2])
    np.save(array, np.array([3, 1, "x"], dtype=object), allow_pickle=True)
    assert_cannot_be_read(array, description.read_bytes())


def test_an_empty_file_and_a_description_without_its_parts_are_refused(tmp_path: Path) -> None:
    array, description = LengthIndex.from_array(np.array([1, 2]), fingerprint="f").write(tmp_path)
    text = (tmp_path / description).read_bytes()
    with pytest.raises(LengthsError, match=r"cannot be read \('processor'\)"):
        LengthIndex.open(tmp_path / array, text.replace(b"processor", b"smell"), fingerprint="f")
    (tmp_path / array).write_bytes(b"")
    with pytest.raises(LengthsError, match="cannot be read"):
        LengthIndex.open(tmp_path / array, text, fingerprint="f")


def test_a_released_index_reads_the_same(tmp_path: Path) -> None:
    lengths = np.arange(1, 100_000)
    array, description = LengthIndex.from_array(lengths, fingerprint="f").write(tmp_path)
    index = LengthIndex.open(tmp_path / array, (tmp_path / description).read_bytes(), fingerprint="f")
    assert index.lengths.sum() == lengths.sum()
    index.release()
    assert np.array_equal(index.lengths, lengths)
    LengthIndex.from_array(lengths).release()
