"""The whole way in each kind of store: sources, conversion, commands, streaming, checkpoints, deletion.

Kills in these stores, and all tests of checkpoints, are those of test_convert_runs.py, test_overwriting.py,
test_checkpoint.py, jobs/test_resume.py and jobs/test_torchrun.py, which take them in `make test-long`.
"""

from __future__ import annotations

import gzip
import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.merge import merge_datasets
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.measuring import index_dataset
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.fetch_config import FetchConfig
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.inspect.summary import inspect_dataset
from lmms_stream.train.checkpoint.saving import STAGING_NAME
from lmms_stream.train.report.train_log import read_log

from ..conftest import run_cli, write_tokens
from ..converters.test_convert_runs import written
from ..mds.reading import MARKS, upload
from ..rounds import rounds
from .runs import trainer_of, write_small_run

pytestmark = MARKS
NUM_ROWS = 400
OPTIONS: dict[str, Any] = {"shard_bytes": 1 << 14, "unit_bytes": 20_000}


def lines(numbers: range) -> bytes:
    rows = ({"text": f"{number} " + "word " * (number % 60)} for number in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_sources_of_a_store_become_the_dataset_that_files_become(any_store_folder: str, tmp_path: Path) -> None:
    store, target = open_storage(any_store_folder), f"{any_store_folder}/out"
    (tmp_path / "sources").mkdir()
    for name, data in (("a.jsonl", lines(range(200))), ("b.jsonl.gz", gzip.compress(lines(range(200, NUM_ROWS))))):
        (tmp_path / "sources" / name).write_bytes(data)
        store.write(f"sources/{name}", data)
    convert([f"{any_store_folder}/sources"], target, num_workers=2, **OPTIONS)
    convert([tmp_path / "sources"], str(tmp_path / "out"), num_workers=1, **OPTIONS)
    ours, theirs = written(target), written(str(tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 4
    assert all(ours[name] == theirs[name] for name in ours if name.startswith(("shard.", "index.")))
    assert verify_dataset(target, deep=True, num_workers=1).problems == ()
    assert inspect_dataset(target, first=-1).num_samples == NUM_ROWS
    assert run_cli("inspect", target, "--json").returncode == 0


def test_what_is_converted_anew_replaces_what_was_there_and_nothing_else(any_store_folder: str, tmp_path: Path) -> None:
    source, store = tmp_path / "rows.jsonl", open_storage(any_store_folder)
    source.write_bytes(lines(range(NUM_ROWS)))
    convert([source], any_store_folder, num_workers=1, **OPTIONS)
    store.write("mine.txt", b"kept")
    before = set(written(any_store_folder))
    source.write_bytes(lines(range(50)))
    report = convert([source], any_store_folder, num_workers=1, overwrite=True, **OPTIONS)
    after = {each.key for each in store.list_objects("")}
    assert len({name for name in after if name.startswith("shard.")}) == report.num_shards
    assert len(after) < len(before)
    assert store.read("mine.txt") == b"kept"
    assert [row["text"].split()[0] for row in PackedStreamingDataset(any_store_folder, tmp_path / "cache")[:]] == [
        str(number) for number in range(50)
    ]


def test_datasets_are_measured_merged_and_verified_where_they_lie(any_store_folder: str, tmp_path: Path) -> None:
    processor, parts = TokensProcessor(), [f"{any_store_folder}/a", f"{any_store_folder}/b"]
    write_tokens(tmp_path / "made", num_samples=200, with_index=False)
    for part in parts:
        upload(tmp_path / "made", part)
        assert len(index_dataset(part, processor, num_workers=1, work=tmp_path / "work").lengths) == 200
    assert merge_datasets(any_store_folder, parts).num_samples == 400
    assert verify_dataset(any_store_folder, deep=True, processor=processor, num_workers=1).problems == ()
    store = open_storage(parts[0])
    shard = store.list_objects("shard.")[0].key
    store.write(shard, store.read(shard)[:-1])
    assert shard in verify_dataset(any_store_folder, num_workers=1).problems[0].where


@pytest.mark.parametrize("num_workers", rounds([2], [0, 2]))
def test_a_stream_through_a_bounded_cache_is_resumed_in_the_middle(
    num_workers: int, any_store_folder: str, tmp_path: Path
) -> None:
    """Workers are forked from a process that has read from the store."""
    write_tokens(tmp_path / "made", num_samples=4000)
    upload(tmp_path / "made", any_store_folder)

    def loader(local: Path, cache_limit: int | None) -> PackedLoader:
        dataset = PackedStreamingDataset(
            any_store_folder,
            local,
            processor=TokensProcessor(),
            packing=PackingConfig(packing_length=512, overlong="drop"),
            order=OrderConfig(num_canonical_nodes=2, shuffle_block_size=100),
            fetch=FetchConfig(cache_limit=cache_limit),
        )
        return PackedLoader(dataset, global_batch=4, num_workers=num_workers, timeout_s=60)

    whole = [batch.sample_ids.tolist() for batch in loader(tmp_path / "whole", None)]
    assert sorted(chain.from_iterable(whole)) == list(range(4000))
    limit = sum(path.stat().st_size for path in (tmp_path / "made").glob("shard.*")) * 2 // 3
    first, found = loader(tmp_path / "cold", limit), []
    for batch in first:
        found.append(batch.sample_ids.tolist())
        if len(found) == 16:
            break
    state = first.state_dict()
    second = loader(tmp_path / "other", limit)
    second.load_state_dict(state)
    found += [batch.sample_ids.tolist() for batch in second]
    assert found == whole
    held = sum(path.stat().st_size for path in (tmp_path / "other").rglob("shard.*.mds"))
    assert 0 < held <= limit


def test_a_run_goes_on_from_its_checkpoints_in_a_store_which_keeps_the_latest(
    any_store_folder: str, tmp_path: Path
) -> None:
    write_tokens(tmp_path / "made", num_samples=200)
    data = upload(tmp_path / "made", f"{any_store_folder}/data")
    path = write_small_run(tmp_path / "run.yaml", data, save_steps=2, save_total_limit=2, lr_scheduler_type="constant")
    losses = {}
    for name, *stops in (("whole", 6), ("resumed", 3, 6)):
        for stop in stops:
            shutil.rmtree(tmp_path / name, ignore_errors=True)  # the log lies beside the checkpoints, too
            killed = tmp_path / name / STAGING_NAME / "rank-7" / "__7_0.distcp"  # by a rank of a larger world
            killed.parent.mkdir(parents=True)
            killed.touch()
            saved = f"train.checkpoint_dir={any_store_folder}/{name}"
            trainer_of(path, f"train.output_dir={tmp_path / name}", saved, f"train.max_steps={stop}").train()
            assert not [*(tmp_path / name).rglob("*.distcp")]
        losses[name] = [record["loss"] for record in read_log(tmp_path / name)]
    assert losses["resumed"] == losses["whole"]
    assert len(losses["whole"]) == 6
    steps = {each.key.split("/")[0] for each in open_storage(f"{any_store_folder}/resumed").list_objects("step-")}
    assert steps == {"step-00000004", "step-00000006"}
