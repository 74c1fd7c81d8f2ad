"""Sources become shards once, whoever asks first, and whole, whatever is killed on the way."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows import mapper
from lmms_stream.datasets import DatasetConfig, MultiModalDataset
from lmms_stream.doors.lmms_engine.datasets import building as building_module
from lmms_stream.doors.lmms_engine.datasets.building import Building, build_once, building_of, cache_of
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.storage.locks import locked
from lmms_stream.types import World

from ..conftest import last_words
from ..jobs.launcher import run_job, start_job
from .chats import text_config, write_jsonl

LIMIT_S = 120


@pytest.fixture
def config(tokenizer: Path, tmp_path: Path) -> dict[str, Any]:
    return text_config(write_jsonl(tmp_path / "chats.jsonl"), tokenizer, tmp_path / "cache")


def building(config: dict[str, Any]) -> tuple[Building, MultiModalDataset]:
    dataset = MultiModalDataset(config)
    return building_of(dataset.config, dataset.processor), dataset


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.mds"))}


def test_two_ranks_that_build_at_once_have_one_copy(config: dict[str, Any], tmp_path: Path) -> None:
    done = run_job(2, "tests.datasets.build_job", json.dumps(config), str(tmp_path), timeout_s=LIMIT_S)
    assert done.returncode == 0, last_words(done.stderr)
    made = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert made[0] == made[1]
    assert done.stderr.count("converting the sources") == 1


def test_a_build_that_is_killed_goes_on_to_the_same_shards(config: dict[str, Any], tmp_path: Path) -> None:
    write_jsonl(Path(config["dataset_path"]), 10_000)
    begun, dataset = building(config)
    with start_job(1, "tests.datasets.build_job", json.dumps(config), str(tmp_path)) as job:
        deadline = time.monotonic() + LIMIT_S
        while not (Path(begun.target) / "_lmms" / "unfinished.json").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        job.send_signal(signal.SIGKILL)
        assert job.wait(LIMIT_S) == -signal.SIGKILL
    assert not begun.is_whole
    assert len(dataset.build().core.read([0, 9_999])) == 2
    convert([begun.listed], str(tmp_path / "whole"), num_workers=1, options=begun.options)
    assert shards(Path(begun.target)) == shards(tmp_path / "whole")


def test_a_process_of_another_node_waits_for_the_first(config: dict[str, Any]) -> None:
    begun, dataset = building(config)
    world = World(rank=1, world_size=2, num_nodes=2)
    with pytest.raises(DataError, match=r"within 0.2 s: all nodes must see this folder: name another with cache_dir"):
        build_once(dataset.config, dataset.processor, world=world, wait_s=0.2)
    dataset.build()
    assert build_once(dataset.config, dataset.processor, world=world, wait_s=0.2) == begun.target


def test_a_process_that_waits_too_long_for_another_says_so(config: dict[str, Any]) -> None:
    begun, dataset = building(config)
    begun.home.mkdir(parents=True, exist_ok=True)
    with (
        locked(begun.home / "build.lock", timeout_s=0),
        pytest.raises(DataError, match=r"no other process converted the sources into .* within 0.2 s"),
    ):
        build_once(dataset.config, dataset.processor, world=World(), wait_s=0.2)


def test_sources_that_were_changed_are_other_sources(config: dict[str, Any]) -> None:
    before, _ = building(config)
    write_jsonl(Path(config["dataset_path"]), 61)
    after, _ = building(config)
    assert before.target != after.target


def test_a_version_that_stores_rows_otherwise_converts_them_anew(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, dataset = building(config)
    monkeypatch.setattr(building_module, "ROWS_VERSION", mapper.ROWS_VERSION + 1)
    assert building_of(dataset.config, dataset.processor).target != before.target


def test_shards_lie_in_the_store_that_is_named(
    config: dict[str, Any], s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3.removeprefix("s3://")
    stored = {**config, "object_storage": "s3", "bucket_name": bucket, "cache_dir": None}
    with pytest.raises(
        ConfigError, match=f"none is written into bucket_name '{bucket}'.* data_folder: {s3} in .*cache"
    ):
        MultiModalDataset(stored).build()
    built = MultiModalDataset({**config, "cache_dir": f"{s3}/lmms_stream"}).build()
    assert MultiModalDataset(stored).build().core.url == built.core.url
    here = DatasetConfig(**config)
    assert cache_of(here) == config["cache_dir"]
    assert cache_of(DatasetConfig(**{**stored, "object_storage": "gcs"})) == f"gs://{bucket}/lmms_stream"
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "me")
    named = cache_of(DatasetConfig(**{**stored, "object_storage": "azure"}))
    assert named == f"azure://me.blob.core.windows.net/{bucket}/lmms_stream"
    monkeypatch.delenv("AZURE_ACCOUNT_NAME")
    with pytest.raises(ConfigError, match="set AZURE_ACCOUNT_NAME"):
        cache_of(DatasetConfig(**{**stored, "object_storage": "azure"}))
    with pytest.raises(ConfigError, match="both set the folder of shards: leave one of them out"):
        cache_of(DatasetConfig(**{**stored, "cache_dir": "x"}))
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_of(DatasetConfig(**{**config, "cache_dir": None})) == "/caches/lmms_stream/datasets"
