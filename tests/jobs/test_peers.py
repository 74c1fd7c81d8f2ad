"""Jobs on the CPU that read from a store, or whose ranks are nodes that take shards from each other."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from lmms_stream.train.report.train_log import read_log

from tests.conftest import last_words
from tests.proxy import FaultProxy, Rule
from tests.rounds import in_long_rounds
from tests.storage.test_eviction import upload_tokens
from tests.train.runs import write_run

from .launcher import run_job
from .runs import differences


@in_long_rounds
@pytest.mark.timeout(300)
def test_a_run_whose_nodes_take_shards_from_each_other_learns_the_same(s3_folder: str, tmp_path: Path) -> None:
    upload_tokens(s3_folder, tmp_path / "data", num_samples=500)
    num_shards = len([*(tmp_path / "data").glob("shard.*")])
    config = write_run(tmp_path / "run.yaml", s3_folder, num_train_epochs=1, num_workers=1)
    counts = {}
    for name, peers in (("alone", "false"), ("peers", "true")):
        overrides = (
            "dataset.local=cache", "dataset.num_canonical_nodes=1", f"dataset.fetch.peers={peers}",
            f"train.output_dir={tmp_path / name / 'out'}",
        )  # fmt: skip
        done = run_job(
            2, "tests.jobs.peers_job", str(config), str(tmp_path / name), *overrides, timeout_s=120, num_nodes=2
        )
        assert done.returncode == 0, last_words(done.stderr)
        counts[name] = [json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in range(2)]
    assert differences(tmp_path / "alone" / "out", tmp_path / "peers" / "out") == []
    assert sum(each["misses"] for each in counts["peers"]) == num_shards
    both = sum(each["misses"] for each in counts["alone"])
    assert sum(each["misses"] + each["from_peers"] for each in counts["peers"]) == both > num_shards
    records = read_log(tmp_path / "peers" / "out")
    assert sum(record.get("data/from_peers", 0) for record in records) == both - num_shards
    assert {record.get("data/peer_failures", 0) for record in records} == {0}
    assert not any("data/from_peers" in record for record in read_log(tmp_path / "alone" / "out"))


@in_long_rounds
@pytest.mark.timeout(300)
def test_a_run_waits_out_a_store_that_is_away_for_twenty_seconds(
    s3_folder: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    upload_tokens(s3_folder, tmp_path / "data", num_samples=500)
    config = write_run(tmp_path / "run.yaml", s3_folder, num_train_epochs=1, num_workers=1)
    for name, rules in (("calm", ()), ("outage", (Rule(path=r"shard\.", status=503, for_s=20),))):
        proxy.set_rules(*rules)
        overrides = (
            f"dataset.local={tmp_path / name / 'cache'}", "dataset.fetch.attempts=1",
            f"train.output_dir={tmp_path / name / 'out'}",
        )  # fmt: skip
        begun = time.monotonic()
        done = run_job(2, "lmms_stream.train", str(config), *overrides, timeout_s=120)
        assert done.returncode == 0, last_words(done.stderr)
        assert time.monotonic() - begun > 20 * len(rules)
    assert differences(tmp_path / "calm" / "out", tmp_path / "outage" / "out") == []
