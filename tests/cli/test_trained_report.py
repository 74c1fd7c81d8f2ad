"""`lmms-stream plan` shows for each source how many tokens are trained on, or that it does not know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.cli.main import main
from lmms_stream.converters.convert import convert
from lmms_stream.mds.core import PackedDataset
from lmms_stream.mds.streams import StreamConfig
from lmms_stream.plan.packing import PackingConfig
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.tools.plan.report import report_trained

from ..conftest import write_samples

PACKING = PackingConfig(packing_length=64)
OPTIONS = ["--packing-length", "64", "--global-batch", "2"]


def tokens_of(folder: Path, spans: list[list[list[int]]]) -> str:
    """A dataset of samples of 10 tokens each."""
    write_samples(folder, [(np.arange(10, dtype=np.int32), np.array(each, np.int32).reshape(-1, 2)) for each in spans])
    return str(folder)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    """What the command prints as JSON of what is trained on, and as text."""
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["trained"]
    assert main(["plan", *arguments]) == 0
    return found, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_share_of_trained_tokens_and_samples_without_any_are_shown_for_each_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = tokens_of(tmp_path / "some", [[[5, 10]], [[0, 1]], [[0, 1]], [[0, 10]]])
    none = tokens_of(tmp_path / "none", [[[0, 1]]] * 8)
    (first, second), shown = planned(capsys, some, none, *OPTIONS)
    assert (first["source"], first["num_samples"], first["num_looked_at"]) == ("some", 4, 4)
    assert first["trained_share"] == (5 + 0 + 0 + 9) / 40  # nothing predicts the first token
    assert (first["num_without"], first["num_refused"], first["unknown"]) == (2, 0, None)
    assert (second["trained_share"], second["num_without"]) == (0, 8)
    assert "trained share 35.00% 0.00%" in shown
    assert "samples with nothing trained on 2 8" in shown
    assert "nothing is trained on in any of the 8 samples of none that were looked at" in shown
    assert "samples of some" not in shown


def test_samples_that_are_looked_at_are_spread_over_a_source_and_fewer_than_all(tmp_path: Path) -> None:
    folder = tokens_of(tmp_path / "many", [[[5, 10]] if number < 2000 else [[0, 1]] for number in range(4000)])
    dataset = PackedDataset([StreamConfig(remote=folder)], processor=TokensProcessor(), packing=PACKING)
    found = report_trained(dataset, dataset.processor, source="many")
    assert 900 < found.num_looked_at < 1200 < found.num_samples == 4000
    assert found.trained_share == pytest.approx(0.25, abs=0.02)
    assert found.num_without == pytest.approx(found.num_looked_at / 2, rel=0.05)
    assert report_trained(dataset, dataset.processor, source="many", num_sources=50).num_looked_at < 100


def test_shards_that_are_missing_are_not_looked_at(tmp_path: Path) -> None:
    folder = Path(tokens_of(tmp_path / "part", [[[5, 10]]] * 4000))
    dataset = PackedDataset([StreamConfig(remote=folder)], processor=TokensProcessor(), packing=PACKING)
    assert (folder / "shard.00001.mds").exists()
    _ = dataset.plan
    (folder / "shard.00001.mds").unlink()
    found = report_trained(dataset, dataset.processor, source="part")
    assert found.unknown is None
    assert found.trained_share == 0.5


def test_chats_need_the_tokenizer_and_a_runs_file_has_it(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "how are you?"}, {"role": "assistant", "content": "well " * number}]}
        for number in range(1, 9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats, processor = str(tmp_path / "chats"), ChatProcessor.from_pretrained(str(tokenizer))
    convert([tmp_path / "rows.jsonl"], chats, processor=processor, num_workers=1)
    ((unknown,), shown) = planned(capsys, chats, *OPTIONS)
    assert (unknown["trained_share"], unknown["num_looked_at"]) == (None, 0)
    assert "the share of trained tokens of chats is not known: pass --tokenizer with the folder or hub id of a" in shown
    ((known,), shown) = planned(capsys, chats, *OPTIONS, "--tokenizer", str(tokenizer))
    made = [processor.process({"messages": json.dumps(row["messages"])}) for row in rows]
    trained = sum(int((each["labels"] != -100).sum()) for each in made)
    total = sum(len(each["labels"]) for each in made)
    assert (known["trained_share"], known["num_without"]) == (pytest.approx(trained / total), 0)
    assert "not known" not in shown
    settings = {
        "dataset": {"remote": chats, "packing_length": 64, "processor": {"tokenizer": str(tokenizer)}},
        "model": {"config": {"model_type": "qwen3"}},
        "train": {"global_batch": 2, "max_steps": 2, "output_dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    ((of_run,), _) = planned(capsys, str(tmp_path / "run.yaml"))
    assert of_run["trained_share"] == known["trained_share"]


def test_a_plan_downloads_and_decompresses_no_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tokens_of(tmp_path / "plain", [[[5, 10]]] * 8)
    convert([plain], str(tmp_path / "small"), compression="zstd", num_workers=1)
    ((unknown,), shown) = planned(capsys, str(tmp_path / "small"), *OPTIONS)
    assert unknown["trained_share"] is None
    assert "trained tokens of small is not known: its shards are compressed, and a plan" in shown
    for path in Path(plain).glob("*.mds"):
        path.unlink()
    ((unknown,), _) = planned(capsys, plain, *OPTIONS)
    assert unknown["unknown"].startswith("its shards are not in a local folder, and a plan")


def test_samples_that_the_processor_refuses_are_counted(tmp_path: Path) -> None:
    folder = tokens_of(tmp_path / "data", [[[5, 10]], [[5, 11]]])
    dataset = PackedDataset([StreamConfig(remote=folder)], processor=TokensProcessor(), packing=PACKING)
    found = report_trained(dataset, dataset.processor, source="data")
    assert (found.trained_share, found.num_refused, found.num_looked_at) == (0.5, 1, 2)
