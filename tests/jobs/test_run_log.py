"""What real runs log, against what is computed here from the dataset alone."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.loader.loader import PackedLoader
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.plan.assign import LINEAR_COST
from lmms_stream.plan.order import OrderConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.train.report.train_log import read_log
from lmms_stream.types import World
from numpy.typing import NDArray

from tests.conftest import last_words, run_command, write_tokens
from tests.rounds import in_long_rounds

from .runs import train

PACKING_LENGTH, GLOBAL_BATCH, STEPS, PEAK_TFLOPS = 256, 6, 8, 0.25
HIDDEN, INNER, LAYERS, HEADS, VOCABULARY = 32, 64, 2, 4, 512

READ_EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
found = {name: [[e.step, e.value] for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
for name in events.Tags()["tensors"]:
    found[name] = [[e.step, e.tensor_proto.string_val[0].decode()] for e in events.Tensors(name)]
print(json.dumps(found))
"""
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

# LevelDB's log format: a header of 7 bytes, then blocks of 32 KiB of fragments (checksum, size, kind: 1 whole, 4 last).
data, at, record, found = Path(sys.argv[1]).read_bytes(), 7, b"", {"history": [], "ids": [], "alerts": []}
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, size, kind = struct.unpack_from("<IHB", data, at)
    record += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(record)
        record = b""
        if message.WhichOneof("record_type") == "run":
            found["ids"].append(message.run.run_id)
        if message.WhichOneof("record_type") == "alert":
            found["alerts"].append([message.alert.title, message.alert.text])
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            found["history"].append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the steps of two ranks hold, from the lengths of the samples: of each step the segments of each rank."""

    segments: list[list[NDArray[np.int64]]]
    packs: list[int]
    packs_of_epoch: int

    def tokens(self, step: int) -> list[int]:
        return [int(rank.sum()) for rank in self.segments[step]]

    def imbalance(self, step: int) -> float:
        costs = [float((rank**2 + LINEAR_COST * rank).sum()) for rank in self.segments[step]]
        return max(costs) / (sum(costs) / 2)

    def loss_tokens(self, step: int) -> int:
        return sum(int((rank - rank // 2).sum()) for rank in self.segments[step])

    def flops(self, step: int) -> float:
        layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
        pairs = sum(int((rank**2).sum()) for rank in self.segments[step])
        head = 6 * HIDDEN * VOCABULARY * self.loss_tokens(step)
        return 6 * (LAYERS * layer + HIDDEN) * sum(self.tokens(step)) + head + 12 * LAYERS * HIDDEN * pairs


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.int64]]:
    folder = tmp_path_factory.mktemp("compressed") / "data"
    return folder, write_tokens(folder, num_samples=400, compression="zstd").astype(np.int64)


@pytest.fixture(scope="module")
def expected(lengths: tuple[Path, NDArray[np.int64]], tmp_path_factory: pytest.TempPathFactory) -> Expected:
    folder, of_sample = lengths
    segments: list[list[NDArray[np.int64]]] = [[] for _ in range(STEPS)]
    packs = [0] * STEPS
    for rank in range(2):
        dataset = PackedStreamingDataset(
            folder,
            tmp_path_factory.mktemp("look"),
            processor=TokensProcessor(),
            packing=PackingConfig(packing_length=PACKING_LENGTH),
            order=OrderConfig(num_canonical_nodes=2),
        )
        loader = PackedLoader(dataset, global_batch=GLOBAL_BATCH, world=World(rank=rank, world_size=2))
        mine: list[list[NDArray[np.int64]]] = [[] for _ in range(STEPS)]
        for batch in loader:
            if batch.step < STEPS:
                mine[batch.step].append(of_sample[batch.sample_ids.numpy()])
                packs[batch.step] += 1
        for step in range(STEPS):
            segments[step].append(np.concatenate(mine[step]))
    return Expected(segments=segments, packs=packs, packs_of_epoch=loader.mixture.plans["data"].num_packs(0))


@pytest.fixture(scope="module")
def config(lengths: tuple[Path, NDArray[np.int64]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {
        "dataset": {
            "remote": str(lengths[0]),
            "processor": {"type": "tokens"},
            "packing_length": PACKING_LENGTH,
            "num_canonical_nodes": 2,
        },
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
            }
        },
        "train": {
            "output_dir": "unused",
            "global_batch": GLOBAL_BATCH,
            "max_steps": STEPS,
            "lr_scheduler_type": "constant",
            "num_workers": 1,
            "peak_tflops": PEAK_TFLOPS,
        },
    }
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def single(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The log of a run of two ranks, a record for each step, from an empty cache."""
    output = tmp_path_factory.mktemp("single")
    train(config, output, "train.log_sample_ids=true", f"dataset.local={output / 'cache'}")
    return read_log(output)


def test_each_step_is_logged_as_the_dataset_says(single: list[dict[str, Any]], expected: Expected) -> None:
    assert [record["step"] for record in single] == list(range(1, STEPS + 1))
    packs_seen = 0
    for step, record in enumerate(single):
        tokens = expected.tokens(step)
        packs_seen += expected.packs[step]
        assert record["num_steps"] == 1
        assert record["num_tokens"] == sum(tokens)
        assert record["num_loss_tokens"] == expected.loss_tokens(step)
        assert record["epoch"] == pytest.approx(packs_seen / expected.packs_of_epoch)
        figures = {
            "perf/tokens_per_s": sum(tokens) / record["seconds"],
            "perf/samples_per_s": len(record["sample_ids"]) / record["seconds"],
            "perf/packing_efficiency": sum(tokens) / (expected.packs[step] * PACKING_LENGTH),
            "perf/padding_share": 0,
            "perf/global_seq_len_avg": sum(tokens) / 2,
            "perf/global_seq_len_min": min(tokens),
            "perf/global_seq_len_max": max(tokens),
            "perf/cost_imbalance": expected.imbalance(step),
            "perf/tflops_per_device": expected.flops(step) / record["seconds"] / 2 / 1e12,
            "perf/mfu": expected.flops(step) / record["seconds"] / 2 / (PEAK_TFLOPS * 1e12),
        }
        assert {name: record[name] for name in figures} == pytest.approx(figures)
    assert any(len(set(expected.tokens(step))) == 2 for step in range(STEPS))
    assert [record["tokens_seen"] for record in single] == np.cumsum([r["num_tokens"] for r in single]).tolist()


def test_waiting_downloads_and_memory_are_logged(
    single: list[dict[str, Any]], lengths: tuple[Path, NDArray[np.int64]]
) -> None:
    index = json.loads((lengths[0] / "index.json").read_text())
    num_bytes = [shard["zip_data"]["bytes"] for shard in index["shards"]]
    num_bytes += [path.stat().st_size for path in (lengths[0] / "_lmms" / "lengths").iterdir()]
    downloaded = sum(record["data/downloaded_mb_per_s"] * record["seconds"] for record in single)
    misses = sum(record["data/cache_misses"] for record in single)
    assert 0 < misses <= len(num_bytes)  # each file once for both ranks
    assert min(num_bytes) * misses / 1e6 <= downloaded * 1.0001 <= sum(num_bytes) / 1e6 * 1.001
    assert 0 <= sum(record["data/cache_hits"] for record in single) <= len(num_bytes)
    for record in single:
        assert 0 <= record["data/wait_share"] <= 1
        assert 0 <= record["data/wait_p50_s"] <= record["data/wait_p99_s"]
        assert 50 < record["memory/process_mib"] < 50_000
        assert "memory/cuda_peak_mib" not in record
    longest = single[0]["data/wait_share"] * single[0]["seconds"]
    assert single[0]["data/wait_p50_s"] == pytest.approx(longest)  # of one step


@in_long_rounds
def test_a_resumed_run_goes_on_in_every_report(
    config: Path, single: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record for three steps, stopped after the fourth with half a line in the log; TensorBoard, W&B, traces."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    output = tmp_path / "run"
    options = ["train.logging_steps=3", "train.report_to=[tensorboard, wandb]", "train.profile_steps=[1, 3]"]
    train(config, output, *options, "train.max_steps=4")
    assert [record["step"] for record in read_log(output)] == [3, 4]
    with (output / "train_log.jsonl").open("a") as log:
        log.write('{"step": 5, "lo')
    train(config, output, *options)
    records = read_log(output)
    assert [(record["step"], record["num_steps"]) for record in records] == [(3, 3), (4, 1), (6, 2), (8, 2)]
    for record in records:
        steps = single[record["step"] - record["num_steps"] : record["step"]]
        check_averages(record, steps)
    check_tensorboard(output / "tensorboard", records)
    check_wandb(output / "wandb", records)
    traces = [output / "profile" / f"rank-{rank}-step-{step}.json" for rank in range(2) for step in (2, 6)]
    assert sorted((output / "profile").iterdir()) == traces
    for path in traces:
        trace = json.loads(path.read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum(name.startswith("Optimizer.step") for name in names) >= 2
        assert "aten::mm" in names


def check_averages(record: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """A record of several steps against the records of each."""
    loss_tokens = [step["num_loss_tokens"] for step in steps]
    tokens = sum(step["num_tokens"] for step in steps)
    expected = {
        "loss": float(np.average([step["loss"] for step in steps], weights=loss_tokens)),
        "grad_norm": float(np.mean([step["grad_norm"] for step in steps])),
        "num_tokens": tokens,
        "num_loss_tokens": sum(loss_tokens),
        "perf/tokens_per_s": tokens / record["seconds"],
        "perf/global_seq_len_avg": float(np.mean([step["perf/global_seq_len_avg"] for step in steps])),
        "perf/global_seq_len_min": min(step["perf/global_seq_len_min"] for step in steps),
        "perf/global_seq_len_max": max(step["perf/global_seq_len_max"] for step in steps),
        "perf/cost_imbalance": float(np.mean([step["perf/cost_imbalance"] for step in steps])),
        "tokens_seen": steps[-1]["tokens_seen"],
        "samples_seen": steps[-1]["samples_seen"],
        "epoch": steps[-1]["epoch"],
    }
    assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def check_tensorboard(folder: Path, records: list[dict[str, Any]]) -> None:
    scalars = read(READ_EVENTS, folder)
    for name in ("loss", "grad_norm", "learning_rate", "perf/tokens_per_s", "perf/mfu", "data/wait_share"):
        steps, values = zip(*scalars[name], strict=True)
        assert list(steps) == [record["step"] for record in records]
        assert list(values) == pytest.approx([record[name] for record in records])


def check_wandb(folder: Path, records: list[dict[str, Any]]) -> None:
    found = [read(READ_WANDB, path) for path in sorted(folder.glob("offline-run-*/run-*.wandb"))]
    assert len(found) == 2
    assert len({run_id for each in found for run_id in each["ids"]}) == 1
    history = [item for each in found for item in each["history"]]
    assert [item["step"] for item in history] == [record["step"] for record in records]
    assert [item["perf/mfu"] for item in history] == pytest.approx([record["perf/mfu"] for record in records])


def read(script: str, path: Path) -> dict[str, Any]:
    result = run_command(sys.executable, "-c", script, str(path), timeout_s=60)
    assert result.returncode == 0, last_words(result.stderr)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found
