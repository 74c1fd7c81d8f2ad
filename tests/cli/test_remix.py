from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmms_stream.__main__ import main
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.report.train_log import read_log
from lmms_stream.train.run.distributed import end_distributed

from ..conftest import write_tokens
from ..train.runs import MODEL, train_settings, trainer_of


def dataset(path: Path, **settings: Any) -> dict[str, Any]:
    return {"remote": str(path), "processor": {"type": "tokens"}, "packing_length": 256, **settings}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML file of a run that has trained four steps of two sources, beside its output and a third source."""
    folder = tmp_path_factory.mktemp("remix")
    for name, num_samples in (("a", 90), ("b", 60), ("c", 40)):
        write_tokens(folder / name, num_samples=num_samples)
    settings = {
        "datasets": {name: dataset(folder / name) for name in "ab"},
        "model": {"config": MODEL},
        "train": train_settings(folder / "x", global_batch=4)
        | {"output_dir": str(folder / "run"), "weights": {"a": 1, "b": 1}, "max_steps": 4},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    trainer_of(path).train()
    end_distributed()
    return path


def with_settings(config: Path, to: Path, *, datasets: dict[str, Any], **train: Any) -> Path:
    """The YAML file with other sources and settings of its section `train`."""
    settings = yaml.safe_load(config.read_text())
    to.write_text(yaml.safe_dump(settings | {"datasets": datasets, "train": settings["train"] | train}))
    return to


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_planned_from_its_file(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is shown is what the options say of the same datasets; what the file says itself is refused as an option."""
    folders = [str(config.parent / name) for name in "ab"]
    options = ["--packing-length", "256", "--weights", "1", "1", "--global-batch", "4", "--epochs", "2"]
    of_run = planned(capsys, str(config), "--epochs", "2", "--world-size", "2")
    ends = {"num_run_steps": 4, "run_end": "train.max_steps: 4"}
    of_datasets = planned(capsys, *folders, *options, "--world-size", "2")
    assert of_run == of_datasets | {"steps": of_datasets["steps"] | ends}
    of_larger_steps = planned(capsys, *folders, *options[:-4], "--global-batch", "8")["steps"] | ends
    assert planned(capsys, str(config), "--global-batch", "8")["steps"] == of_larger_steps
    assert planned(capsys, str(config), "train.global_batch=8")["steps"] == of_larger_steps
    assert [each["num_beyond_positions"] for each in of_run["epochs"]] == [None] * 4
    settings = yaml.safe_load(config.read_text())
    settings["model"] = {"config": MODEL | {"max_position_embeddings": 40}}
    (tmp_path / "positions.yaml").write_text(yaml.safe_dump(settings))
    counted = planned(capsys, str(tmp_path / "positions.yaml"))["epochs"]
    assert all(0 < each["num_beyond_positions"] < each["num_samples"] for each in counted)
    assert main(["plan", str(config), "train.max_steps=400", "train.max_epochs={a: 2}"]) == 0
    shown = capsys.readouterr().out
    assert f"next: lmms-stream train {config} train.max_steps=400 'train.max_epochs={{a: 2}}'" in shown
    rows = [line.strip("│ ").split("│") for line in shown.splitlines() if line.startswith("│")]
    figures = {cells[0].strip(): cells[1].strip() for cells in rows}
    assert (figures["steps of the run"], figures["end of the run"]) == ("400", "train.max_steps: 400")
    assert figures["steps until all sources end"] == "no end"
    for wrong, message in (
        ([str(config), "--packing-length", "512"], "run.yaml already sets this: leave --packing-length out, or change"),
        ([str(config), "--seed", "0"], "run.yaml already sets this: leave --seed out"),
        ([str(config), folders[0]], "already names its datasets: leave " + folders[0] + " out; only settings (SETTING"),
        ([folders[0], str(config)], "run.yaml is the file of a run, which already names its datasets: leave the"),
        (
            [folders[0], "train.max_steps=3"],
            "train.max_steps=3: there is no such dataset, and a setting (SETTING=VALUE)",
        ),
        ([str(config), "train.steps=3"], "unknown key 'train.steps'"),
        ([folders[0]], "--packing-length is missing: say how many tokens a pack holds, or name a run's YAML file"),
        ([str(config), "--from", "x", "--strategy", "next_fit"], "--strategy is not taken together with --from"),
    ):
        assert main(["plan", *wrong]) == 1
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("settings", "num_steps", "end"),
    [
        (["train.num_train_epochs=2"], "2 epochs", "train.num_train_epochs: 2"),
        (["train.num_train_epochs=2", "train.skip_steps=[[1, 3], [2, 4]]"], "2 epochs", "train.num_train_epochs: 2"),
        (["train.max_tokens=1000000"], None, "train.max_tokens: 1,000,000"),
        (["train.weights={a: 1, b: 1}", "train.max_epochs={a: 1, b: 1}", "train.max_steps=900"], "all packs",
         "train.max_epochs: all sources end"),
    ],
)  # fmt: skip
def test_the_steps_of_a_run_are_those_of_its_file(
    config: Path, capsys: pytest.CaptureFixture[str], settings: list[str], num_steps: str | None, end: str
) -> None:
    found = planned(capsys, str(config), "train.weights=null", *settings)
    steps = found["steps"]
    expected = {"2 epochs": 2 * steps["num_steps"], "all packs": steps["num_steps"], None: None}[num_steps]
    assert steps["num_steps"] == -(-sum(each["num_packs"] for each in found["epochs"]) // 4)
    skipped = 3 if "train.skip_steps=[[1, 3], [2, 4]]" in settings else 0
    assert (steps["num_run_steps"], steps["run_end"]) == (None if expected is None else expected - skipped, end)


def test_a_folder_with_an_equals_sign_in_its_name_is_a_dataset(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "date=2024").symlink_to(config.parent / "a")
    assert planned(capsys, str(tmp_path / "date=2024"), "--packing-length", "256")["epochs"][0]["num_samples"] == 90


def test_the_next_step_of_a_plan_has_the_settings_that_were_planned(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent / "a"
    assert main(["plan", str(folder), "--packing-length", "512", "--strategy", "next_fit", "--seed", "3"]) == 0
    said = capsys.readouterr().out.partition("where run.yaml has ")[2]
    (section,) = [line for line in " ".join(said.split()).splitlines() if line]
    shown = yaml.safe_load(section.replace("processor: …", "processor: {type: tokens}"))["dataset"]
    run = with_settings(config, tmp_path / "run.yaml", datasets={"a": shown}, weights={"a": 1})
    settings = ["--packing-length", "512", "--strategy", "next_fit", "--seed", "3", "--global-batch", "4"]
    assert planned(capsys, str(run))["epochs"][0] == planned(capsys, str(folder), *settings)["epochs"][0]


def test_a_change_is_told_before_the_resume_and_is_what_the_resumed_run_reads(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`a` is left out, `c` comes in, a step holds more packs; the run is resumed in a copy of its folder."""
    run = config.parent / "run"
    datasets = {name: dataset(config.parent / name) for name in "bc"}
    changed = with_settings(config, tmp_path / "changed.yaml", datasets=datasets, weights={"b": 1, "c": 1}, max_steps=9)
    change = ["--weights", "b=3,c=1", "--max-epochs", "b=2", "c=3", "--global-batch", "6"]
    told = planned(capsys, str(changed), "--from", str(run), *change)
    assert (told["first"], told["stop"]) == (4, 9)
    assert {name: each["status"] for name, each in told["sources"].items()} == {
        "a": "removed", "b": "kept", "c": "added",
    }  # fmt: skip
    overrides = ["train.weights={b: 3, c: 1}", "train.max_epochs={b: 2, c: 3}", "train.global_batch=6"]
    resumed = f"train.resume={run / 'checkpoints' / 'step-00000004'}"
    trainer_of(changed, *overrides, resumed, f"train.output_dir={tmp_path / 'run'}").train()
    end_distributed()
    read: dict[str, int] = dict.fromkeys("abc", 0)
    for record in read_log(tmp_path / "run"):
        for name in record["sample_ids"]:
            read[name.split(":")[0]] += 1
    assert {name: each["num_samples"] for name, each in told["sources"].items()} == read
    amounts = Ledger(tmp_path / "run").amounts()
    assert {name: each["num_unread_samples"] for name, each in told["sources"].items()} == {
        name: each.num_unseen for name, each in amounts.items()
    }


def test_a_change_of_a_run_of_mixed_samples_is_told_for_each_dataset(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = {name: dataset(config.parent / name) for name in "abc"}
    mixing = {"mixing": "samples", "weights": {"a": 2, "b": 1, "c": 1}, "output_dir": str(tmp_path / "run")}
    run = with_settings(config, tmp_path / "run.yaml", datasets=datasets, **mixing)
    trainer_of(run).train()
    end_distributed()
    (tmp_path / "drop").write_text("".join(f"c:{number}\n" for number in range(20)))
    change = ["train.global_batch=6", "train.max_steps=12", f"train.bad_samples.drop={tmp_path / 'drop'}"]
    told = planned(capsys, str(run), *change, "--from", str(tmp_path / "run"))
    assert (told["first"], told["stop"], told["global_batch_before"], told["global_batch"]) == (4, 12, 4, 6)
    sources = told["sources"]
    assert {name: each["status"] for name, each in sources.items()} == dict.fromkeys("abc", "kept")
    assert sum(each["packs_per_step"] for each in sources.values()) == pytest.approx(6, abs=0.5)
    assert [each["token_share"] for each in sources.values()] == pytest.approx([0.5, 0.25, 0.25], abs=0.05)
    before = Counter(name for record in read_log(tmp_path / "run") for name in record["sample_ids"])
    trainer_of(run, *change).train()
    end_distributed()
    whole = Counter(name for record in read_log(tmp_path / "run") for name in record["sample_ids"])
    read = whole - before
    for name, each in sources.items():
        of_name = {sample: count for sample, count in read.items() if sample.startswith(f"{name}:")}
        assert each["num_samples"] == sum(of_name.values()) > 0
        assert each["num_new_samples"] == sum(sample not in before for sample in of_name)
        assert each["num_repeated_samples"] == each["num_samples"] - each["num_new_samples"]
    dropped = sum(count for sample, count in read.items() if sample in {f"c:{number}" for number in range(20)})
    assert [each["num_left_out_samples"] for each in sources.values()] == [0, 0, dropped]
    assert dropped > 20  # some twice
    amounts = Ledger(tmp_path / "run").amounts()
    assert {name: each["num_unread_samples"] for name, each in sources.items()} == {
        name: each.num_unseen for name, each in amounts.items()
    }
    assert main(["plan", str(run), "--from", str(tmp_path / "run"), "--weights", "a=1,b=1", "--steps", "3"]) == 1
    assert "they differ in the shards (dataset), or the samples of its streams" in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_table_and_the_line_of_each_source_say_it_for_people(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(config), "--from", str(config.parent / "run"), "--max-epochs", "a=1,b=2"]
    assert main([*arguments, "--steps", "3", "--global-batch", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "steps 4 to 6, 2 packs a step (before: 4)" in shown
    assert re.search(r"token share before │ \d+\.\d\d% │ \d+\.\d\d%", shown)
    set_in_words = ["plan", str(config), "train.max_epochs={a: 1, b: 2}", "train.global_batch=2", *arguments[2:4]]
    assert main([*set_in_words, "--steps", "3"]) == 0
    assert " ".join(capsys.readouterr().out.split()) == shown
    assert "packs per step" in shown
    assert "a, kept: " in shown
    assert "samples were read before" in shown
    assert main([*arguments, "--steps", "1000"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "its max_epochs end with step" in shown
    assert "no source has packs left after step" in shown
    assert "; 0 samples stay unread" in shown


def test_left_out_samples_and_the_phases_of_the_weights_are_told(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop = tmp_path / "drop.txt"
    drop.write_text("".join(f"a:{number}\n" for number in range(90)))
    datasets = {name: dataset(config.parent / name) for name in "ab"}
    weights = {0: {"a": 1, "b": 1}, 7: {"a": 1, "b": 3}}
    changed = with_settings(
        config,
        tmp_path / "changed.yaml",
        datasets=datasets,
        weights=weights,
        max_steps=12,
        bad_samples={"drop": str(drop)},
    )
    told = planned(capsys, str(changed), "--from", str(config.parent / "run"))
    assert told["sources"]["a"]["num_left_out_samples"] == told["sources"]["a"]["num_samples"] > 0
    assert told["sources"]["b"]["num_left_out_samples"] == 0
    assert [(each["first"], each["stop"]) for each in told["phases"]] == [(4, 7), (7, 12)]
    assert [each["token_shares"]["a"] for each in told["phases"]] == pytest.approx([0.5, 0.25], abs=0.1)
    assert main(["plan", str(changed), "--from", str(config.parent / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "left out samples" in shown
    assert "of those read are left out, as padding" in shown
    assert "steps 7 to 11: a " in shown
    launch = tmp_path / "launch.yaml"
    launch.write_text("trainer_type: fsdp2_trainer\n")
    assert main(["plan", str(launch), "--from", str(config.parent / "run")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "launch.yaml is a launch file, whose global batch follows from the number of ranks: write a run's" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "3", "1"], "--weights 3 1: with --from the option needs NAME=NUMBER,…, for example a=3,b=1,"),
        (["--weights", "a=1,d=2"], "weights name 'd', the sources are a, b"),
        (["--max-epochs", "a=x"], "--max-epochs a=x: with --from the option needs NAME=NUMBER"),
        (["--packing-length", "256"], "--packing-length is not taken together with --from"),
        (
            ["more.yaml"],
            "already names its datasets: leave more.yaml out; only settings (SETTING=VALUE) follow the file",
        ),
        ([], "no step is left from step 4 on: the run is at its end"),
    ],
)
def test_a_change_that_cannot_be_is_one_line(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), *arguments, "--from", str(config.parent / "run")]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_checkpoint_that_does_not_follow_the_plan_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = {"a": dataset(config.parent / "a", seed=7), "b": dataset(config.parent / "b")}
    other = with_settings(config, tmp_path / "other.yaml", datasets=datasets, max_steps=8)
    assert main(["plan", str(other), "--from", str(config.parent / "run")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the checkpoint follows plan" in said
    assert "they differ in the order settings" in said
    lanes = {"a": dataset(config.parent / "a", packing_mode="lanes")}
    other = with_settings(config, tmp_path / "lanes.yaml", datasets=lanes, weights={"a": 1}, max_steps=8)
    assert main(["plan", str(other), "--from", str(config.parent / "run")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the packs of 'a' of" in said
    assert "are made in lanes during reading, and are unknown before" in said
    assert main(["plan", str(config), "--from", str(tmp_path)]) == 1
    assert "has no complete checkpoint" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_does_not_say_where_it_ends_needs_a_number_of_steps(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = {name: dataset(config.parent / name) for name in "ab"}
    endless = with_settings(config, tmp_path / "e.yaml", datasets=datasets, max_steps=None, max_tokens=10**9)
    run = str(config.parent / "run")
    assert main(["plan", str(endless), "--from", run]) == 1
    assert "say with --steps N how many steps from the checkpoint on" in " ".join(capsys.readouterr().err.split())
    assert planned(capsys, str(endless), "--from", run, "--steps", "2")["stop"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "--steps needs --from, the checkpoint of a run"),
        (["--max-epochs", "a=1"], "--max-epochs needs --from"),
        ([], "--packing-length is missing: say how many tokens a pack holds, or name a run's"),
        (["--from", "x"], "with --from name the YAML file of one run, got"),
        (["--packing-length", "256", "--weights", "a=1"], "--weights a=1: names are taken with --from"),
    ],
)
def test_what_is_of_a_run_alone_is_refused_for_datasets(
    config: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config.parent / "a"), *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
