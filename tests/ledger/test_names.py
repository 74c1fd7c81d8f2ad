"""What samples are called: before a run, by the rows of their sources, in datasets that grew or are made again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.converters.append import append
from lmms_stream.converters.convert import convert
from lmms_stream.errors import ConfigError, CursorError
from lmms_stream.mds.provenance import Provenance
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.ledger.console import print_amounts, print_step
from lmms_stream.tools.ledger.opening import RunHistory, open_history
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.types import World
from rich.console import Console

from tests.conftest import run_cli, write_tokens
from tests.train.runs import MODEL, train_settings

MEASURED: dict[str, Any] = {"processor": TokensProcessor(), "shard_bytes": 1 << 12}


def write_rows(path: Path, first: int, stop: int) -> Path:
    rows = [
        {"input_ids": [number % 500] * (20 + number * 7 % 31), "loss_spans": [[5, 9]]} for number in range(first, stop)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, remotes: dict[str, Path], **train: Any) -> Path:
    settings = {"processor": {"type": "tokens"}, "packing_length": 256}
    config = folder / "run.yaml"
    run = {
        "datasets": {name: {"remote": str(remote), **settings} for name, remote in remotes.items()},
        "model": {"config": MODEL},
        "train": train_settings(folder / "x", global_batch=4) | train,
    }
    config.write_text(yaml.safe_dump(run))
    return config


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A dataset of 120 rows of one file, shuffled."""
    write_rows(tmp_path / "rows.jsonl", 0, 120)
    convert([tmp_path / "rows.jsonl"], str(tmp_path / "data"), shuffle_seed=1, **MEASURED)
    return tmp_path / "data"


def test_a_config_says_what_its_run_will_read(rows: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, {"chats": rows}, num_train_epochs=2, skip_steps=[[3, 5]])
    ledger = Ledger(config, world=World(world_size=4, num_nodes=2))
    assert ledger.stop == 0
    assert ledger.end is not None
    packs = [pack for number in range(ledger.end) for pack in ledger.step(number).packs]
    read = [sample_id for pack in packs for sample_id in pack.sample_ids.tolist()]
    assert sorted(read) == sorted([*range(120)] * 2)
    assert {pack.group for pack in packs} == {0, 1, 2, 3}
    for sample_id in (0, 57, 119):
        entries = ledger.sample("chats", sample_id)
        assert [entry.epoch for entry in entries] == [0, 1]
        for entry in entries:
            assert entry.step is not None
            assert sample_id in {id for pack in ledger.step(entry.step).packs for id in pack.sample_ids.tolist()}
            assert ledger.when(entry) == ("passed over" if entry.step in (3, 4) else "planned")
    assert ledger.amounts(ledger.end)["chats"].num_samples < 240


def test_a_sample_that_the_run_ends_before_is_said_to_be_beyond_its_end(rows: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, {"chats": rows}, max_steps=2, skip_steps=[[1, 2]])
    ledger = Ledger(config)
    assert ledger.end == 3  # the step that is passed over is none of the two
    late = ledger.step(3).packs[0].sample_ids[0]
    (entry,) = ledger.sample("chats", int(late))
    assert (entry.step, ledger.when(entry)) == (3, "beyond the end")
    assert Ledger(config, overrides=["train.max_steps=9"]).end == 10


def test_a_source_without_steps_says_why(rows: Path, tmp_path: Path) -> None:
    write_tokens(tmp_path / "other", num_samples=60)
    both = {"chats": rows, "other": tmp_path / "other"}
    config = write_config(tmp_path, both, max_steps=5, weights={"chats": 1, "other": 0})
    ledger = Ledger(config)
    (entry,) = ledger.sample("other", 3)
    assert ledger.when(entry) == "not read"
    assert ledger.why_nowhere("other", 3) == "no step reads it: the weights of other give it no steps"
    assert ledger.first_step([("other", 3), ("chats", 5)]) is None  # nothing is trained
    once = ["train.weights={chats: 1, other: 1}", "train.max_epochs={other: 1}", "train.max_steps=40"]
    ended = Ledger(config, overrides=once)
    assert [entry.epoch for entry in ended.sample("other", 3)] == [0]
    assert ended.why_nowhere("other", 3) == "other ended before: max_epochs gives it 1"
    lacking = ended.origins.samples_of_row
    with pytest.raises(ConfigError, match="the dataset of other has no record of the sources of its samples"):
        lacking("rows.jsonl", 999)


def test_no_id_of_a_step_is_cut_in_a_terminal_of_80_columns(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lmms_stream.tools.ledger.console.console", Console(width=80))
    name = "a_source_with_a_name_that_is_much_longer_than_its_column"
    ledger = Ledger(write_config(tmp_path, {name: rows}, max_steps=5))
    step = ledger.step(1)
    print_step(ledger, step, as_json=False)
    shown = capsys.readouterr().out.partition("\n")[2].partition("note: ")[0]
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    cells = [line.split("│") for line in shown.splitlines()]
    assert "".join(each[3].strip() for each in cells if len(each) == 9) == name * len(step.packs)
    wrapped = " ".join(each[3].strip() for each in cells if len(each) == 5)
    for pack in step.packs:
        of_pack = ledger.origins.of(name, pack.sample_ids.tolist())
        assert of_pack is not None
        named = [f"{id} ({Path(str(row)).name})" for id, row in zip(pack.sample_ids, of_pack, strict=True)]
        assert ", ".join(named[:12]) in wrapped


def test_samples_have_the_rows_that_they_were_made_of(rows: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, {"chats": rows}, max_steps=5)
    ledger = Ledger(config)
    (found,) = ledger.origins.samples_of_row("rows.jsonl", 17)
    assert ledger.tokens_of(*found) == 20 + 16 * 7 % 31
    said = json.loads(run_cli("ledger", str(config), "--sample", "rows.jsonl:17", "--json").stdout)
    assert ("chats", said["sample"]) == found
    assert said["row"].endswith("rows.jsonl:17")
    assert said["identity"] == ledger.identities["chats"]
    step = json.loads(run_cli("ledger", str(config), "--step", "1", "--world-size", "2", "--json").stdout)
    provenance = Provenance.of(open_storage(str(rows)))
    assert provenance is not None
    for pack in step["packs"]:
        assert pack["rows"] == [str(provenance.source_of(sample_id)) for sample_id in pack["sample_ids"]]
    shown = run_cli("ledger", str(config), "--step", "1").stdout
    assert f"step 1, computed from {config}" in shown
    assert "which has no record of training: name the output_dir of the run for its trained steps" in shown
    of_sample = run_cli("ledger", str(config), "--sample", "rows.jsonl:17").stdout
    assert "planned" in of_sample
    assert "nothing to repeat" not in of_sample
    late = run_cli("ledger", str(config), "--step", "40").stdout
    assert "beyond the end of the run, which ends before step 5" in " ".join(late.split())
    assert "rows.jsonl:" in "".join(shown.split())
    with pytest.raises(ConfigError, match=r"rows.jsonl:0: rows are counted from 1"):
        ledger.origins.samples_of_row("rows.jsonl", 0)
    with pytest.raises(ConfigError, match=r"rows.jsonl:999 is not a sample of the run \(row 999 was left out"):
        ledger.origins.samples_of_row("rows.jsonl", 999)


def test_a_dataset_that_has_grown_is_read_as_it_was_and_keeps_its_ids(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, {"chats": rows}, max_steps=9)
    history = open_history(str(config))
    before = [pack.sample_ids.tolist() for pack in Ledger(history).step(2).packs]
    row = Ledger(history).origins.of("chats", [7])
    append([tmp_path / "rows.jsonl", write_rows(tmp_path / "more.jsonl", 120, 150)], str(rows), **MEASURED)
    ledger = Ledger(history)
    assert [pack.sample_ids.tolist() for pack in ledger.step(2).packs] == before
    assert ledger.origins.of("chats", [7]) == row
    assert ledger.num_added == {"chats": 30}
    print_amounts(ledger, 3, as_json=False)
    assert "chats has grown by 30 samples since" in " ".join(capsys.readouterr().out.split())
    assert ledger.origins.renamed("chats", [7, 99], url=str(rows)) == [[7], [99]]


def test_a_dataset_that_was_converted_again_is_another_one_whose_names_map_by_rows(rows: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, {"chats": rows}, max_steps=9)
    history = open_history(str(config))
    again = tmp_path / "again"
    convert([tmp_path / "rows.jsonl"], str(again), shuffle_seed=2, **MEASURED)
    ledger = Ledger(history)
    (theirs,) = ledger.origins.renamed("chats", [7], url=str(again))
    ours = ledger.origins.of("chats", [7])
    provenance = Provenance.of(open_storage(str(again)))
    assert provenance is not None
    assert ours == [provenance.source_of(theirs[0])]
    said = run_cli("ledger", str(config), "--sample", "7", "--renamed", str(again)).stdout
    assert f"again: {theirs[0]}" in "".join(said.split("\n")) or str(theirs[0]) in said
    with pytest.raises(CursorError, match="The run's ids belong to the dataset of that time"):
        Ledger(history, urls={"chats": str(again)})
    for name in ("provenance.npy", "provenance.json"):
        (again / "_lmms" / name).unlink()
    with pytest.raises(ConfigError, match="has no record of the sources of its samples, so ids of chats do not"):
        ledger.origins.renamed("chats", [7], url=str(again))


def test_samples_of_equal_lengths_in_another_order_are_another_dataset(tmp_path: Path) -> None:
    """Their plans are the same, so that the checksums of the shards alone tell them apart."""
    same = [{"input_ids": [number] * 30, "loss_spans": [[5, 9]]} for number in range(100)]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in same))
    for seed in (1, 2):
        convert([tmp_path / "same.jsonl"], str(tmp_path / f"data{seed}"), shuffle_seed=seed, **MEASURED)
    history = open_history(str(write_config(tmp_path, {"chats": tmp_path / "data1"}, max_steps=9)))
    shutil.copytree(tmp_path / "data1", tmp_path / "copy")
    assert Ledger(history, urls={"chats": str(tmp_path / "copy")}).step(0).packs
    with pytest.raises(CursorError, match=r"the run read a dataset [0-9a-f]{16} as 'chats', and [0-9a-f]{16} lies at"):
        Ledger(history, urls={"chats": str(tmp_path / "data2")})
    earlier = [dict(each) for each in history.stretches]
    for each in earlier:
        each["sources"] = {name: {**source} for name, source in each["sources"].items()}
        del each["sources"]["chats"]["identity"]
    assert Ledger(RunHistory(where="earlier", stretches=earlier), urls={"chats": str(tmp_path / "data2")}).step(0).packs


def test_configs_of_which_nothing_is_known_beforehand_are_refused(rows: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, {"chats": rows}, max_steps=9)
    with pytest.raises(ConfigError, match=r"the packs of 'chats' of .* are made in lanes during reading"):
        Ledger(config, overrides=["datasets.chats.packing_mode=lanes"])
    with pytest.raises(ConfigError, match=r"--world-size 3: of .* 2 ranks share their packs: name a multiple"):
        Ledger(config, world=World(world_size=3), overrides=["train.sequence_parallel=2"])
    with pytest.raises(ConfigError, match="is not a config, and its checkpoint already has the ranks"):
        Ledger(tmp_path / "runs", world=World(world_size=2))
