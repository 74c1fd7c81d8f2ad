from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.merge import MergeReport, merge_datasets
from lmms_stream.errors import ConfigError, LengthsError, LmmsStreamError, ShardError, StorageError
from lmms_stream.mds.index import DATASET_NAME, INDEX_NAME
from lmms_stream.mds.lengths import LengthIndex
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.base import processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus
from streaming import MDSWriter, StreamingDataset

from ...conftest import run_cli, write_tokens


def write_sources(folder: Path, *, compression: str | None = None) -> list[str]:
    """Three plain tokenized datasets of several shards each, the last two levels down; with lengths indexes."""
    sources = [folder / "a", folder / "b", folder / "more" / "c"]
    for number, source in enumerate(sources):
        write_tokens(source, num_samples=100 + 50 * number, compression=compression)
    return [str(source) for source in sources]


def upload(folder: Path, url: str) -> None:
    store = open_storage(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.upload(path, str(path.relative_to(folder)))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def first_tokens(dataset: StreamingDataset) -> list[int]:
    return [int(dataset[number]["input_ids"][0]) for number in range(len(dataset))]


EXPECTED = [*range(100), *range(150), *range(200)]


@pytest.mark.filterwarnings("ignore:unclosed file")  # MosaicML Streaming's, as it decompresses
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_merged_dataset_is_read_by_us_and_by_mosaicml_without_a_copied_shard(
    compression: str | None, tmp_path: Path
) -> None:
    sources = write_sources(tmp_path / "all", compression=compression)
    before = contents(tmp_path / "all")
    report = merge_datasets(str(tmp_path / "all"), sources)
    after = contents(tmp_path / "all")
    added = {name for name in after if name not in before}
    assert {name: after[name] for name in before} == before
    assert not any("shard" in name for name in added)
    assert added == {INDEX_NAME, *json.loads(after[DATASET_NAME])["other_files"], DATASET_NAME}
    assert (report.num_sources, report.num_samples, report.num_lengths_indexes, report.dropped) == (3, 450, 1, ())

    ours = PackedStreamingDataset(tmp_path / "all", tmp_path / "cache", processor=TokensProcessor())
    assert first_tokens(ours) == EXPECTED
    theirs = StreamingDataset(remote=str(tmp_path / "all"), local=str(tmp_path / "theirs"), batch_size=1)
    assert first_tokens(theirs) == EXPECTED
    assert first_tokens(StreamingDataset(local=str(tmp_path / "all"), batch_size=1)) == EXPECTED


def test_lengths_that_all_sources_have_become_one_index(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    merge_datasets(str(tmp_path), sources)
    expected = np.concatenate([np.load(next(Path(source).glob("_lmms/lengths/*.npy"))) for source in sources])
    dataset = PackedStreamingDataset(tmp_path, processor=TokensProcessor(), packing=PackingConfig(packing_length=128))
    assert np.array_equal(dataset.length_index().lengths, expected)
    assert dataset.plan.num_tokens(0) == expected.sum()
    merged = dataset.length_index().content_hash
    for path in tmp_path.glob("_lmms/lengths/*"):
        path.unlink()
    assert index_dataset(str(tmp_path), TokensProcessor(), num_workers=1).content_hash == merged


@pytest.mark.filterwarnings("ignore:unclosed file")  # MosaicML Streaming's, as it decompresses
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_merged_dataset_in_an_object_store_is_read_under_a_cache_limit(
    compression: str | None, s3: str, tmp_path: Path
) -> None:
    url = f"{s3}/merged-{compression}"
    write_sources(tmp_path / "made", compression=compression)
    upload(tmp_path / "made", url)
    merge_datasets(url, [f"{url}/a", f"{url}/b/", f"{url}/more/c"])
    theirs = StreamingDataset(remote=url, local=str(tmp_path / "theirs"), batch_size=1)
    assert first_tokens(theirs) == EXPECTED

    largest = max(
        info.size + (info.zip_size or 0) for info in PackedStreamingDataset(url, tmp_path / "x").core.shard_infos
    )
    limit = 3 * largest
    ours = PackedStreamingDataset(url, tmp_path / "ours", fetch=FetchConfig(cache_limit=limit, ahead=1, threads=1))
    for number, first in enumerate(EXPECTED):
        assert int(ours[number]["input_ids"][0]) == first
        held = [path for path in (tmp_path / "ours").rglob("[!.]*.mds*") if path.is_file()]
        assert sum(path.stat().st_size for path in held) <= limit
    assert {path.parent.name for path in (tmp_path / "ours").rglob(".*.mds.lock")} <= {"a", "b", "c"}
    assert held


def test_leftovers_of_killed_downloads_are_removed_below_folders_too(s3: str, tmp_path: Path) -> None:
    url = f"{s3}/leftovers"
    write_sources(tmp_path / "made")
    upload(tmp_path / "made", url)
    merge_datasets(url, [f"{url}/a", f"{url}/more/c"])
    left = tmp_path / "cache" / "more" / "c" / ".shard.00000.mds.12345-0.tmp"
    mine = tmp_path / "cache" / "b" / ".shard.00000.mds.12345-0.tmp"
    for path in (left, mine):
        path.parent.mkdir(parents=True)
        path.touch()
    PackedStreamingDataset(url, tmp_path / "cache")
    assert not left.exists()
    assert mine.exists()


def test_sources_of_a_merge_may_be_merges(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    merge_datasets(str(tmp_path / "more"), sources[2:])
    merge_datasets(str(tmp_path), [*sources[:2], str(tmp_path / "more")])
    assert first_tokens(PackedStreamingDataset(tmp_path)) == EXPECTED
    with pytest.raises(ConfigError, match=r"more and more/c both list more/c/shard\.00000\.mds: leave one of the two"):
        merge_datasets(str(tmp_path), [str(tmp_path / "more"), sources[2]], overwrite=True)
    assert first_tokens(PackedStreamingDataset(tmp_path)) == EXPECTED


def test_converted_datasets_keep_their_checksums_and_lengths_that_only_some_have_are_named(
    corpus: Corpus, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    convert([corpus.functions], str(tmp_path / "functions"), processor=chat_processor, shard_bytes=1 << 15)
    convert([corpus.classes], str(tmp_path / "classes"))
    sources = [str(tmp_path / "functions"), str(tmp_path / "classes")]
    report = merge_datasets(str(tmp_path), sources)
    (reason,) = report.dropped
    assert "(ChatProcessor) is left out, because classes has none: write it with lmms-stream index" in reason
    dataset = json.loads((tmp_path / DATASET_NAME).read_text())
    assert dataset["schema"] == "messages"
    assert dataset["lengths"] == []
    assert [source["name"] for source in dataset["sources"]] == ["functions", "classes"]
    assert all(len(shard["xxh3_64"]) == 16 for shard in dataset["shards"])
    index_dataset(str(tmp_path / "classes"), chat_processor, num_workers=1)
    report = merge_datasets(str(tmp_path), sources, overwrite=True)
    assert (report.num_lengths_indexes, report.dropped) == (1, ())
    merged = PackedStreamingDataset(tmp_path, processor=chat_processor)
    assert len(merged) == corpus.num_functions + corpus.num_classes
    assert len(merged.length_index().lengths) == len(merged)


def test_lengths_of_plain_datasets_in_folders_are_found_without_being_listed(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    for source in sources[:2]:
        lengths = np.load(next(Path(source).glob("_lmms/lengths/*.npy")))
        LengthIndex.from_array(lengths, fingerprint="other", processor={"class": "Other"}).write(Path(source))
    report = merge_datasets(str(tmp_path), sources)
    (reason,) = report.dropped
    assert reason.startswith("lengths index other (Other) is left out, because more/c has none")
    LengthIndex.from_array(np.arange(1, 201), fingerprint="other").write(Path(sources[2]))
    assert merge_datasets(str(tmp_path), sources, overwrite=True).num_lengths_indexes == 2


def test_an_earlier_merge_is_replaced_only_when_asked_and_no_shard_is_removed(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    merge_datasets(str(tmp_path), sources)
    (tmp_path / "mine.txt").write_text("kept")
    before = contents(tmp_path)
    with pytest.raises(StorageError, match=r"holds a dataset already: choose another target, or pass --overwrite"):
        merge_datasets(str(tmp_path), sources[:1])
    assert contents(tmp_path) == before
    merge_datasets(str(tmp_path), sources[:2], overwrite=True)
    assert first_tokens(PackedStreamingDataset(tmp_path)) == EXPECTED[:250]
    assert contents(tmp_path).keys() == before.keys()
    (tmp_path / DATASET_NAME).unlink()  # as after a merge that was killed
    merge_datasets(str(tmp_path), sources, overwrite=True)
    assert contents(tmp_path) == before


def test_a_conversion_that_overwrites_a_merge_leaves_the_shards_of_its_sources(corpus: Corpus, tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    merge_datasets(str(tmp_path), sources)
    convert([corpus.functions], str(tmp_path), overwrite=True)
    assert len(PackedStreamingDataset(tmp_path)) == corpus.num_functions
    assert len(first_tokens(PackedStreamingDataset(sources[2]))) == 200


def test_a_dataset_with_shards_of_its_own_is_never_replaced(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=20)
    sources = write_sources(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(
        StorageError, match=r"holds a dataset with shards \(shard\.00000\.mds\), which the merged index would not"
    ):
        merge_datasets(str(tmp_path), sources, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "there is nothing to merge: name the folders or URLs of datasets below the target"),
        (["all"], "is not below"),
        (["elsewhere"], "elsewhere is not below"),
        (["all/../elsewhere"], "is not below"),
        (["s3://bucket/a"], "s3://bucket/a is not below"),
        (["all/.hidden"], "hidden folders and _lmms cannot be sources"),
        (["all/_lmms"], "hidden folders and _lmms cannot be sources"),
        (["all/a", "all/b/../a"], "a is given twice: name each source once"),
        (["all/a", "all/none"], "none holds no dataset"),
    ],
)
def test_sources_that_cannot_be_merged_are_named(sources: list[str], message: str, tmp_path: Path) -> None:
    write_sources(tmp_path / "all")
    write_tokens(tmp_path / "elsewhere", num_samples=10)
    paths = [source if "://" in source else f"{tmp_path}/{source}" for source in sources]
    with pytest.raises(LmmsStreamError, match=message):
        merge_datasets(str(tmp_path / "all"), paths)
    assert not (tmp_path / "all" / INDEX_NAME).exists()


def test_columns_that_differ_are_named(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    with MDSWriter(columns={"input_ids": "ndarray:int64", "n": "int"}, out=str(tmp_path / "d")) as writer:
        writer.write({"input_ids": np.zeros(3, np.int64), "n": 1})
    with pytest.raises(ConfigError) as error:
        merge_datasets(str(tmp_path), [*sources, str(tmp_path / "d")])
    assert "d/shard.00000.mds has the columns input_ids (ndarray:int64), n (int, 8 bytes)" in str(error.value)
    assert "a/shard.00000.mds has input_ids (ndarray:int32), loss_spans (ndarray:int32)" in str(error.value)
    assert "datasets are merged when their columns are the same" in str(error.value)


def damage_index(folder: Path) -> None:
    (folder / INDEX_NAME).write_text('{"version": 2, "shards": [{}]}')


def damage_lengths(folder: Path) -> None:
    (path,) = folder.glob("_lmms/lengths/*.npy")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def shorten_lengths(folder: Path) -> None:
    fingerprint = processor_fingerprint(TokensProcessor())
    LengthIndex.from_array(np.arange(1, 31, dtype=np.uint32), fingerprint=fingerprint).write(folder)


def remove_array(folder: Path) -> None:
    next(folder.glob("_lmms/lengths/*.npy")).unlink()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (damage_index, ShardError, r"b/index\.json: not a valid MDS index"),
        (damage_lengths, LengthsError, r"b: .*does not hold the lengths that .* was written for: write it again"),
        (shorten_lengths, LengthsError, r"b: lengths index \w+ has 30 lengths for 200 samples: write it again"),
        (remove_array, LengthsError, r"b: .*\.npy is missing: write it again with lmms-stream index"),
    ],
)
def test_a_damaged_source_is_named_and_nothing_is_written(
    damage: Callable[[Path], None], error: type[LmmsStreamError], message: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "b", num_samples=200)
    write_tokens(tmp_path / "a", num_samples=20)
    damage(tmp_path / "b")
    with pytest.raises(error, match=message):
        merge_datasets(str(tmp_path), [str(tmp_path / "a"), str(tmp_path / "b")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("key", ["other_files", "lengths"])
def test_a_description_that_names_files_elsewhere_is_refused(key: str, corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    convert([corpus.functions], str(tmp_path / "all" / "a"))
    path = tmp_path / "all" / "a" / DATASET_NAME
    described = json.loads(path.read_text())
    path.write_text(json.dumps(described | {key: ["../../precious"]}))
    with pytest.raises(ShardError, match=r"names '\.\./\.\./precious', which is not a plain path below the dataset"):
        merge_datasets(str(tmp_path / "all"), [str(tmp_path / "all" / "a")])
    with pytest.raises(ShardError, match="refused"):
        convert([corpus.functions], str(tmp_path / "all" / "a"), overwrite=True)
    assert (tmp_path / "precious").read_text() == "kept"


def test_progress_counts_the_sources(tmp_path: Path) -> None:
    told: list[Any] = []
    report = merge_datasets(
        str(tmp_path), write_sources(tmp_path), on_start=told.append, on_source=lambda: told.append("source")
    )
    assert told == [3, "source", "source", "source"]
    assert isinstance(report, MergeReport)


def test_the_command_merges_and_reports(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    result = run_cli("merge", str(tmp_path), *sources)
    assert result.returncode == 0, result.stderr
    assert "450" in result.stdout
    result = run_cli("merge", str(tmp_path), *sources)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "pass --overwrite" in result.stderr
    assert run_cli("merge", str(tmp_path), *sources, "--overwrite").returncode == 0
