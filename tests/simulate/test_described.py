"""Sources that do not exist yet: their lengths, packs and shards, and a run of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.__main__ import main
from lmms_stream.errors import ConfigError
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.order import EpochOrder, OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.tools.simulate import Cluster, DescribedSource, describe, simulate
from lmms_stream.tools.simulate.described import COUNTED, TABLE, parse_count

from ..conftest import write_tokens
from ..rounds import in_long_rounds

ORDER = OrderConfig(num_canonical_nodes=4, shuffle_block_size=2000)
PACKING = PackingConfig(packing_length=1024, overlong="split")


@pytest.mark.parametrize(("overlong", "epoch"), [("drop", 0), ("truncate", 1), ("split", 0)])
def test_a_block_has_the_packs_that_are_told_of_it_or_a_few_more(overlong: Any, epoch: int) -> None:
    num_samples = COUNTED + 12_345
    source = DescribedSource(samples=num_samples, mean_length=400)
    packing = PackingConfig(packing_length=1024, overlong=overlong)
    order = OrderConfig(num_canonical_nodes=3, shuffle_block_size=100_000)
    (told,) = describe({"web": source}, packing=packing, order=order).plans.values()
    lengths = told.lengths[np.arange(num_samples)]
    counted = type(told)(lengths, told.samples_per_shard, order=order, packing=packing)
    assert counted.num_tokens(epoch) == told.num_tokens(epoch)
    assert counted.num_overlong(epoch) == told.num_overlong(epoch)
    assert 0.995 < told.num_packs(epoch) / counted.num_packs(epoch) <= 1
    last = told.num_packs(epoch)
    assert len(told.packs(epoch, last - 30_000, last)) == 30_000  # those of the last blocks are there


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any),
    nodes=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_totals_before_a_position_are_those_of_the_samples_before_it(sizes: list[int], nodes: int, seed: int) -> None:
    total = sum(sizes)
    values = np.random.default_rng(seed).integers(0, 100, total)
    sums = np.concatenate([[0], np.cumsum(values)])
    order = EpochOrder(sizes, config=OrderConfig(seed=seed, num_canonical_nodes=nodes), epoch=1)
    laid_out = order._ids(0, total)
    found = order.total_before(np.arange(total + 1), lambda ids: sums[ids])
    assert found.tolist() == np.concatenate([[0], np.cumsum(values[laid_out])]).tolist()


def test_lengths_follow_the_description() -> None:
    points: dict[float, float] = {5: 120, 50: 700, 95: 4600}
    table = DescribedSource(samples=10, percentiles=points).table(0)
    assert len(table) == TABLE
    assert np.percentile(table, [*points]).round().tolist() == [*points.values()]
    assert (table.min(), table.max()) == (120, 4600)
    table = DescribedSource(samples=10, mean_length=900).table(0)
    assert table.mean() == pytest.approx(900, rel=0.01)
    assert np.median(table) == pytest.approx(0.6 * 900, rel=0.03)
    source = DescribedSource(tokens="10.5t", mean_length=1500)
    assert source.num_samples * 1500 == pytest.approx(10.5e12, rel=0.01)


def test_shards_have_the_bytes_of_the_description() -> None:
    source = DescribedSource(samples=100_000, mean_length=500, bytes_per_token=5, shard_bytes="1mb", compression=0.5)
    sources = describe({"text": source}, packing=PACKING, order=ORDER)
    shards, (plan,) = sources.shards["text"], sources.plans.values()
    assert len(shards.stored) == len(plan.samples_per_shard) == pytest.approx(100_000 * 2500 / (1 << 20), abs=2)
    assert shards.stored[:-1] == pytest.approx(1 << 20, rel=0.01)
    assert shards.loaded == pytest.approx(shards.stored / 2, rel=0.01)
    assert sources.zip_bytes == {"text": [int(shards.loaded.max())]}
    assert int(plan.samples_per_shard.sum()) == 100_000


def test_a_described_run_downloads_what_a_written_one_does(tmp_path: Path) -> None:
    """write_tokens draws lengths evenly from 8 to 199; a token is 4 bytes, and samples have some bytes around."""
    write_tokens(tmp_path, num_samples=4000)
    order, packing = OrderConfig(num_canonical_nodes=4, shuffle_block_size=150), PackingConfig(packing_length=256)
    written = PackedDataset([StreamConfig(remote=tmp_path)], packing=packing, order=order)
    lengths = np.asarray(written.plan.lengths)
    sizes = written.one.shards.sizes
    source = DescribedSource(
        samples=len(lengths),
        percentiles={percent: float(np.percentile(lengths, percent)) for percent in range(0, 101, 5)},
        bytes_per_token=float(sizes.sum() / lengths.sum()),
        shard_bytes=int(np.median(sizes)),
    )
    cluster = Cluster(num_nodes=2, gpus_per_node=2, bandwidth="5mbit", step_time_s=0.1)
    real = simulate(written, cluster, global_batch=16)
    told = simulate(describe({"data": source}, packing=packing, order=order), cluster, global_batch=16)
    assert told.num_steps == pytest.approx(real.num_steps, rel=0.03)
    assert told.num_shards == pytest.approx(real.num_shards, rel=0.03)
    assert told.download_bytes == pytest.approx(real.download_bytes, rel=0.1)
    assert told.total_s == pytest.approx(real.total_s, rel=0.1)


@in_long_rounds
def test_ten_billion_samples_are_open_at_once_and_read_in_windows() -> None:
    source = DescribedSource(samples=10**10, mean_length=1500)
    order = OrderConfig(num_canonical_nodes=16, shuffle_block_size=8192)
    sources = describe({"web": source}, packing=PackingConfig(packing_length=8192, overlong="split"), order=order)
    cluster = Cluster(num_nodes=16, gpus_per_node=8, bandwidth="10gbit")
    told = simulate(sources, cluster, global_batch=128, max_samples=1 << 22)  # 32 rounds, each of 0.7 shards a node
    assert told.is_sampled
    assert told.num_steps * 128 * 8192 == pytest.approx(10**10 * 1500, rel=0.01)
    assert told.dataset_bytes == pytest.approx(4 * 1500 * 10**10, rel=0.01)
    assert told.download_bytes == pytest.approx(told.dataset_bytes, rel=0.1)


def test_the_command_reads_a_description(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sources.yaml"
    file.write_text(
        "sources:\n"
        "  web: {tokens: 30m, percentiles: {5: 120, 50: 700, 95: 4600}, shard_bytes: 1mb}\n"
        "  code: {samples: 5_000, mean_length: 2000, shard_bytes: 1mb}\n"
        "weights: {web: 3, code: 1}\n"
        "max_epochs: {web: 1, code: 2}\n"
    )
    command = [
        "simulate", str(file), "--packing-length", "4096", "--overlong", "split", "--global-batch", "16",
        "--canonical-nodes", "2", "--block-size", "500", "--nodes", "2", "--gpus", "2", "--bandwidth", "1gbit",
        "--compare", "shard_bytes=256kb", "--compare", "packing_length=8192",
    ]  # fmt: skip
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulation"]["num_steps"] == pytest.approx(45e6 / 4096 / 16, rel=0.15)
    assert told["compared"]["shard_bytes=256kb"]["num_shards"] > 3 * told["simulation"]["num_shards"]
    assert told["compared"]["packing_length=8192"]["num_steps"] < 0.6 * told["simulation"]["num_steps"]
    assert main([*command, "--overlong", "error"]) == 1
    assert "are longer than packing_length 4096" in capsys.readouterr().err
    assert main(["simulate", str(file), "--global-batch", "16"]) == 1
    assert "a dataset needs --packing-length" in capsys.readouterr().err
    for name, value in (("tokenizer", "x"), ("processor", "text"), ("setting", "fps=1")):
        assert main([*command, f"--{name}", value]) == 1
        assert f"describes lengths, and nothing is measured: leave --{name} out" in capsys.readouterr().err
    file.write_text("sources: {web: {token: 30m, mean_length: 900}}\n")
    assert main([*command]) == 1
    assert "unknown key 'sources.web.token': did you mean 'sources.web.tokens'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert "a dataset that does not exist yet is described in a YAML file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean_length": 5}, "needs exactly one of samples and tokens"),
        ({"mean_length": 5, "samples": 3, "tokens": 9}, "needs exactly one of samples and tokens"),
        ({"samples": 5}, "needs exactly one of mean_length and percentiles"),
        ({"samples": 5, "mean_length": 0.5}, "mean_length must be from 1 to 2147483647 tokens, got 0.5"),
        ({"samples": 5, "percentiles": {5: 9, 50: 8}}, "percents from 0 to 100 to lengths that do not fall"),
        ({"samples": 5, "percentiles": {5: 9, 500: 10}}, "percents from 0 to 100 to lengths that do not fall"),
        ({"samples": 5, "percentiles": {5: 9, 50: float("nan")}}, "percents from 0 to 100 to lengths that do not fall"),
        ({"samples": 5, "percentiles": {5: 9, 50: 2**31}}, "percents from 0 to 100 to lengths that do not fall"),
        ({"samples": 1.5, "mean_length": 5}, "samples 1.5 is not a number"),
        ({"samples": "many", "mean_length": 5}, "samples 'many' is not a number: write for example 7e9, 300m"),
        ({"samples": 5, "mean_length": 5, "bytes_per_token": 0}, "bytes_per_token must be above 0 and at most 1e"),
        ({"samples": 5, "mean_length": 5, "compression": 1.5}, "compression must be above 0 and at most 1, got 1.5"),
        ({"samples": 5, "mean_length": 5, "shard_bytes": "x"}, "shard_bytes 'x' is not a number of bytes"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DescribedSource(**values)


def test_no_sources_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="describe at least one source"):
        describe({}, packing=PACKING)


def test_counts_are_read_as_people_write_them() -> None:
    assert [parse_count(each, name="samples") for each in ("7b", "1.5t", "300_000", 2e6)] == [
        7 * 10**9, 15 * 10**11, 300_000, 2 * 10**6,
    ]  # fmt: skip
