from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream import PackedStreamingDataset
from lmms_stream.converters.convert import Progress, convert
from lmms_stream.converters.dry_run import dry_run, dry_runs
from lmms_stream.converters.options import ConvertOptions
from lmms_stream.errors import ConfigError, LmmsStreamError

from ..conftest import run_cli
from .sources.source_rows import json_lines, write


def weighted(folder: Path, *weights: float | None) -> Path:
    for number in range(3):
        rows = [{"text": f"{number} {row}"} for row in range(number + 1)]
        write(folder / f"part{number % 2}" / f"chats{number // 2}.jsonl", json_lines(rows))
    names = ["part0/chats0.jsonl", "part1/chats0.jsonl", "part0/chats1.jsonl"]
    entries = [{"path": name, "weight": weight} for name, weight in zip(names, weights, strict=True)]
    return write(folder / "list.yaml", yaml.safe_dump({"datasets": entries}).encode())


def test_entries_with_weights_become_datasets_and_a_run_that_mixes_them(tmp_path: Path) -> None:
    path, said = weighted(tmp_path, 3, 1, 0.5), list[str]()
    target = tmp_path / "out"
    for _ in range(2):  # the second time there is nothing to do
        report = convert([path], f"{target}/", num_workers=1, progress=Progress(say=said.append))
        rows = {name: each.num_rows for name, each in report.splits.items()}
        assert rows == {"chats0": 1, "chats0-2": 2, "chats1": 3}
        assert (report.num_rows, report.num_shards, report.num_tokens) == (6, 3, None)
    assert sum("nothing to do" in text for text in said) == 3
    assert said[-1].startswith(f"{target}/datasets.yaml: the datasets and weights of a run")
    run = yaml.safe_load((target / "datasets.yaml").read_text())
    assert run["train"]["weights"] == {"chats0": 3, "chats0-2": 1, "chats1": 0.5}
    assert [len(PackedStreamingDataset(each["remote"])) for each in run["datasets"].values()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"limit": 3},
            r"list\.yaml: its entries have weights, .* and limit cannot apply to all",
        ),
        ({"splits": {"a": 0.5, "b": 0.5}}, "and splits cannot apply to all together"),
        ({"beside": True}, "its entries have weights, so each entry becomes a separate dataset: pass only the"),
    ],
)
def test_what_goes_not_with_weights_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = weighted(tmp_path, 3, 1, 0.5)
    sources = [path, tmp_path / "part0" / "chats0.jsonl"] if options.pop("beside", False) else [path]
    with pytest.raises(LmmsStreamError, match=message):
        convert(sources, str(tmp_path / "out"), num_workers=1, **options)


def test_each_entry_has_a_weight_or_none_has(tmp_path: Path) -> None:
    path = weighted(tmp_path, 3, None, 1)
    with pytest.raises(
        LmmsStreamError, match=r"list\.yaml: entry 2 of datasets: has no weight, and other entries have weights"
    ):
        convert([path], str(tmp_path / "out"), num_workers=1)


def test_a_dry_run_tries_each_entry_that_has_a_weight(tmp_path: Path) -> None:
    path = weighted(tmp_path, 3, 1, 0.5)
    found = dry_runs([path], options=ConvertOptions())
    assert {name: each.num_samples for name, each in found.items()} == {"chats0": 1, "chats0-2": 2, "chats1": 3}
    assert list(dry_runs([tmp_path / "part0" / "chats0.jsonl"], options=ConvertOptions())) == [""]
    with pytest.raises(ConfigError, match=r"each of chats0, chats0-2, chats1 becomes a dataset of its own: call dry_r"):
        dry_run([path])
    shown = run_cli("convert", str(path), "out", "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert all(f" out/{name} " in shown.stdout + shown.stderr for name in found)
    assert not (tmp_path / "out").exists()
