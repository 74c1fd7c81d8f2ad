"""The patches of samples with media, measured, kept and read beside the lengths index."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import DataError, LengthsError, StorageError
from lmms_stream.mds.index import DATASET_NAME, INDEX_NAME, parse_index
from lmms_stream.mds.lengths import LengthIndex, lengths_names, patches_name
from lmms_stream.mds.measuring import index_dataset, keep_lengths, kept_lengths
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.lengths import hash_lengths
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.base import Measured, processor_fingerprint
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage
from lmms_stream.types import Sample

from ...media_words import MediaWords, chat, mixed_chats, write_chats
from ..media_files import image_bytes

NUM_SAMPLES = 200
FINGERPRINT = processor_fingerprint(MediaWords())
ARRAY, DESCRIPTION = lengths_names(FINGERPRINT)
PATCHES = patches_name(FINGERPRINT)
AGAIN = "write it again with lmms-stream index"


def expected(samples: Sequence[Sample]) -> list[Measured]:
    found = MediaWords().measure_media(samples)
    return [each for each in found if isinstance(each, Measured)]


def description(folder: Path) -> dict[str, object]:
    described: dict[str, object] = json.loads((folder / DESCRIPTION).read_text())
    return described


@pytest.mark.parametrize("num_workers", [1, 2])
def test_patches_and_tokens_of_each_kind_are_kept_beside_the_lengths(tmp_path: Path, num_workers: int) -> None:
    samples = mixed_chats(NUM_SAMPLES)
    folder = write_chats(tmp_path / "data", samples)
    index_dataset(str(folder), MediaWords(), num_workers=num_workers)
    wanted = expected(samples)
    index = PackedStreamingDataset(folder, processor=MediaWords()).length_index()
    assert index.lengths.tolist() == [each.tokens for each in wanted]
    assert index.patches is not None
    assert isinstance(index.patches, np.memmap)
    assert index.patches.dtype == np.uint32
    assert index.patches.tolist() == [each.patches for each in wanted]
    copy = PackedStreamingDataset(folder, tmp_path / "local", processor=MediaWords()).length_index()
    assert copy.patches is not None
    assert copy.patches.tolist() == index.patches.tolist()
    of_media = {kind: sum(getattr(each, f"{kind}_tokens") for each in wanted) for kind in ("image", "video", "audio")}
    assert min(of_media["image"], of_media["video"]) > 0
    assert index.num_tokens_of == {"text": index.num_tokens - sum(of_media.values()), **of_media}
    described = description(folder)
    assert described["patches_hash"] == index.patches_hash == hash_lengths(index.patches)
    assert described["num_patches"] == index.num_patches == sum(each.patches for each in wanted)
    assert described["num_tokens_of"] == index.num_tokens_of
    assert np.load(folder / PATCHES).tolist() == index.patches.tolist()


def test_datasets_without_media_keep_the_files_that_they_had(tmp_path: Path) -> None:
    samples = [chat(words) for words in range(1, 50)]
    folder = write_chats(tmp_path / "data", samples)
    index_dataset(str(folder), MediaWords(), num_workers=1)
    assert sorted(path.name for path in (folder / "_lmms" / "lengths").iterdir()) == sorted(
        Path(name).name for name in (ARRAY, DESCRIPTION)
    )
    assert set(description(folder)) == {"version", "num_samples", "num_tokens", "content_hash", "processor"}
    plain = LengthIndex.from_array(np.arange(1, 50), fingerprint=FINGERPRINT, processor=MediaWords().description)
    plain.write(tmp_path / "plain")
    for name in (ARRAY, DESCRIPTION):
        assert (tmp_path / "plain" / name).read_bytes() == (folder / name).read_bytes()


def test_media_that_lack_facts_are_measured_from_their_bytes(tmp_path: Path) -> None:
    with_facts, without = mixed_chats(60), mixed_chats(60, facts=False)
    folder = write_chats(tmp_path / "data", without)
    index = index_dataset(str(folder), MediaWords(), num_workers=1)
    assert np.load(folder / ARRAY).tolist() == [each.tokens for each in expected(with_facts)]
    assert np.load(folder / PATCHES).tolist() == [each.patches for each in expected(with_facts)]
    assert index.fingerprint == FINGERPRINT


class Refuses(MediaWords):
    """Refuses one sample, in a file that says of which number of words."""

    refused = -1

    def measure(self, sample: Sample) -> int:
        return super().measure(sample)

    def measure_media(self, samples: object) -> list[Measured | DataError]:
        found = super().measure_media(samples)  # type: ignore[arg-type]
        return [DataError("refused") if isinstance(each, Measured) and each.tokens == self.refused else each
                for each in found]  # fmt: skip


def test_shards_that_were_measured_keep_both_arrays_for_the_next_run(tmp_path: Path) -> None:
    samples = mixed_chats(NUM_SAMPLES)
    samples[150] = chat(999)
    folder = write_chats(tmp_path / "data", samples)
    stopping = Refuses()
    stopping.refused = 999
    with pytest.raises(DataError, match=r"^sample 150 \(number \d+ of shard.\d+.mds\): refused$"):
        index_dataset(str(folder), stopping, num_workers=1, work=tmp_path / "work")
    shards = parse_index((folder / INDEX_NAME).read_bytes(), source="")
    told: list[int] = []
    for info in shards[:3]:
        (folder / info.name).unlink()  # measured already: it is not read again
    index_dataset(
        str(folder), Refuses(), num_workers=1, work=tmp_path / "work",
        on_start=lambda all_shards, missing: told.extend([len(all_shards), len(missing)]),
    )  # fmt: skip
    assert 3 <= told[0] - told[1] < told[0] == len(shards)
    fingerprint = processor_fingerprint(Refuses())
    assert np.load(folder / lengths_names(fingerprint)[0]).tolist() == [each.tokens for each in expected(samples)]
    assert np.load(folder / patches_name(fingerprint)).tolist() == [each.patches for each in expected(samples)]


def indexed(folder: Path, *, count: int = 40, facts: bool = True) -> Path:
    write_chats(folder, mixed_chats(count, facts=facts))
    index_dataset(str(folder), MediaWords(), num_workers=1)
    return folder


def opened(folder: Path, cache: Path) -> LengthIndex:
    """As a dataset of a store reads it: through this node's cache."""
    dataset = PackedStreamingDataset(
        folder, cache, processor=MediaWords(), packing=PackingConfig(packing_length=256, overlong="drop"),
        packing_mode="plan", fetch=FetchConfig(attempts=1, timeout_s=5),
    )  # fmt: skip
    return dataset.length_index()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            Path.unlink,
            LengthsError,
            rf"has the description of a lengths index without its patches \({PATCHES}\): write",
        ),
        (truncated, StorageError, r"patches\.npy"),
        (flipped, StorageError, r"patches\.npy"),
    ],
)
def test_damaged_patches_are_a_named_error_where_a_dataset_is_read(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    folder = indexed(tmp_path / "data")
    damage(folder / PATCHES)
    with pytest.raises(error, match=message):
        opened(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("found", "shown"), [(np.zeros(3, np.uint32), "uint32[3]"), (np.zeros(40, np.int64), "int64[40]")]
)
def test_patches_of_another_dtype_or_size_are_refused(tmp_path: Path, found: np.ndarray[Any, Any], shown: str) -> None:
    folder = indexed(tmp_path / "data")
    np.save(folder / PATCHES, found)
    message = (
        f"the patches of lengths index {FINGERPRINT} should be uint32[40], found {shown} at {folder / PATCHES}: {AGAIN}"
    )
    with pytest.raises(LengthsError, match=f"^{re.escape(message)}$"):
        LengthIndex.open(folder / ARRAY, (folder / DESCRIPTION).read_bytes(), fingerprint=FINGERPRINT)


def test_patches_cut_short_are_refused(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "data")
    truncated(folder / PATCHES)
    with pytest.raises(
        LengthsError, match=f"^the patches of lengths index {FINGERPRINT} at .* cannot be read \\(.*{AGAIN}$"
    ):
        LengthIndex.open(folder / ARRAY, (folder / DESCRIPTION).read_bytes(), fingerprint=FINGERPRINT)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("patches_hash", "../x", r"its patches_hash '\.\./x' is not 32 hexadecimal digits"),
        ("num_tokens_of", {}, "'text'"),
    ],
)
def test_a_description_that_says_no_sound_things_of_patches_is_refused(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    folder = indexed(tmp_path / "data")
    (folder / DESCRIPTION).write_text(json.dumps(description(folder) | {name: value}))
    with pytest.raises(
        LengthsError, match=rf"^the description of lengths index .* cannot be read \(.*{message}.*{AGAIN}$"
    ):
        opened(folder, tmp_path / "cache")


def test_patches_are_kept_on_a_node_with_the_lengths_and_not_taken_when_damaged(tmp_path: Path) -> None:
    index = opened(indexed(tmp_path / "data"), tmp_path / "cache")
    keep_lengths(tmp_path / "node", index)
    kept = kept_lengths(tmp_path / "node", FINGERPRINT)
    assert kept is not None
    assert kept.patches is not None
    assert kept.patches.tolist() == index.patches.tolist()  # type: ignore[union-attr]
    flipped(tmp_path / "node" / PATCHES)
    assert kept_lengths(tmp_path / "node", FINGERPRINT) is None


def test_verify_names_what_is_wrong_with_patches(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "data", facts=False)
    report = verify_dataset(str(folder), processor=MediaWords(), deep=True, num_workers=1)
    assert (report.num_problems, report.num_lengths_indexes) == (0, 1)
    flipped(folder / PATCHES)
    (problem,) = verify_dataset(str(folder)).problems
    assert (problem.where, problem.what) == (
        ARRAY, f"{PATCHES} does not hold the patches that {DESCRIPTION} was written for: {AGAIN}",
    )  # fmt: skip
    (folder / PATCHES).unlink()
    (problem,) = verify_dataset(str(folder)).problems
    assert problem.what == f"{PATCHES} is missing: {AGAIN}"


def test_verify_compares_the_patches_of_each_sample_and_all_counts(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "data", facts=False)
    index = LengthIndex.open(folder / ARRAY, (folder / DESCRIPTION).read_bytes(), fingerprint=FINGERPRINT)
    assert index.patches is not None
    patches = np.array(index.patches)
    patches[7] += 4
    LengthIndex.from_array(
        np.array(index.lengths), fingerprint=FINGERPRINT, processor=index.processor, patches=patches,
        num_tokens_of=index.num_tokens_of,
    ).write(folder)  # fmt: skip
    (problem,) = verify_dataset(str(folder), processor=MediaWords(), deep=True, num_workers=1).problems
    assert problem.where.startswith("sample 7 (number ")
    assert problem.what == f"has {patches[7] - 4} patches, its lengths index says {patches[7]}: {AGAIN}"
    said = description(folder)
    (folder / DESCRIPTION).write_text(json.dumps(said | {"num_patches": 3}))
    (problem,) = verify_dataset(str(folder)).problems
    assert f"patches, {DESCRIPTION} says 3: {AGAIN}" in problem.what


def test_a_merge_joins_patches_and_counts_none_for_datasets_without_media(tmp_path: Path) -> None:
    parts = [mixed_chats(30, seed=1), [chat(words) for words in range(1, 20)], mixed_chats(25, seed=2)]
    sources = [write_chats(tmp_path / "all" / name, part) for name, part in zip("abc", parts, strict=True)]
    for source in sources:
        index_dataset(str(source), MediaWords(), num_workers=1)
    merge_datasets(str(tmp_path / "all"), [str(source) for source in sources])
    wanted = expected([sample for part in parts for sample in part])
    index = opened(tmp_path / "all", tmp_path / "cache")
    assert index.lengths.tolist() == [each.tokens for each in wanted]
    assert index.patches is not None
    assert index.patches.tolist() == [each.patches for each in wanted]
    assert index.num_tokens_of is not None
    assert index.num_tokens_of["video"] == sum(each.video_tokens for each in wanted)
    assert sum(index.num_tokens_of.values()) == index.num_tokens
    assert PATCHES in json.loads((tmp_path / "all" / DATASET_NAME).read_text())["other_files"]
    assert verify_dataset(str(tmp_path / "all")).problems == ()


def test_a_dataset_without_an_index_is_measured_with_its_patches_when_packs_are_asked_for(tmp_path: Path) -> None:
    samples = mixed_chats(50)
    folder = write_chats(tmp_path / "data", samples)
    dataset = PackedStreamingDataset(
        folder, processor=MediaWords(), packing=PackingConfig(packing_length=1024, overlong="drop")
    )
    assert dataset.mode == "plan"
    assert np.asarray(dataset.plan.index.patches).tolist() == [each.patches for each in expected(samples)]
    assert (folder / PATCHES).is_file()


@pytest.mark.parametrize("order", [{}, {"shuffle_seed": 3}])
def test_a_conversion_measures_patches_with_the_lengths(tmp_path: Path, order: dict[str, Any]) -> None:
    (tmp_path / "rows").mkdir()
    rows = []
    for number in range(60):
        width, height = 28 * (number % 5 + 1), 28 * (number % 3 + 1)
        (tmp_path / "rows" / f"{number}.png").write_bytes(image_bytes(size=(width, height)))
        images = [f"{number}.png"] * (number % 3)
        text = "<image>" * len(images) + " word" * (number % 7 + 1)
        rows.append({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}],
                     "images": images})  # fmt: skip
    source = tmp_path / "rows" / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = tmp_path / "out"
    convert([str(source)], str(target), processor=MediaWords(), num_workers=1, **order)
    dataset = PackedStreamingDataset(target, tmp_path / "cache", processor=MediaWords())
    wanted = expected(list(dataset[:]))
    index = dataset.length_index()
    assert index.lengths.tolist() == [each.tokens for each in wanted]
    assert index.patches is not None
    assert index.patches.tolist() == [each.patches for each in wanted]
    assert sorted(index.patches.tolist()) == sorted(
        4 * (number % 5 + 1) * (number % 3 + 1) * (number % 3) for number in range(60)
    )
    assert verify_dataset(str(target), processor=MediaWords(), deep=True, num_workers=1).problems == ()
    shutil.rmtree(target / "_lmms" / "lengths")
    index_dataset(str(target), MediaWords(), num_workers=1)
    assert np.array_equal(np.load(target / PATCHES), index.patches)


def test_patches_in_a_store_are_fetched_once_and_new_ones_are_not_mistaken_for_the_old(
    tmp_path: Path, s3_folder: str
) -> None:
    folder, store = indexed(tmp_path / "data"), open_storage(s3_folder)
    for path in folder.rglob("*"):
        if path.is_file():
            store.upload(path, str(path.relative_to(folder)))

    def read() -> LengthIndex:
        return PackedStreamingDataset(store.url, tmp_path / "cache", processor=MediaWords()).length_index()

    old = read()
    assert old.patches is not None
    assert old.patches.tolist() == np.load(folder / PATCHES).tolist()
    store.delete(PATCHES)
    assert np.array_equal(read().patches, old.patches)  # type: ignore[arg-type]
    changed = LengthIndex.from_array(
        np.array(old.lengths), fingerprint=FINGERPRINT, processor=old.processor, patches=np.array(old.patches)[::-1],
        num_tokens_of=old.num_tokens_of,
    )  # fmt: skip
    assert changed.write(tmp_path / "new") == (ARRAY, PATCHES, DESCRIPTION)
    store.upload(tmp_path / "new" / DESCRIPTION, DESCRIPTION)
    with pytest.raises(LengthsError, match="has the description of a lengths index without its patches"):
        read()
    store.upload(tmp_path / "new" / PATCHES, PATCHES)
    assert read().patches.tolist() == changed.patches.tolist()  # type: ignore[union-attr]
