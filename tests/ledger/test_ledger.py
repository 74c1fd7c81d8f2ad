"""Ledgers of runs that were trained: against what the runs logged of themselves."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.__main__ import main
from lmms_stream.errors import CheckpointError, ConfigError, CursorError
from lmms_stream.plan.left_out import LeftOut, LeftOutSample
from lmms_stream.tools.ledger.console import print_amounts
from lmms_stream.tools.ledger.opening import open_history
from lmms_stream.tools.ledger.run import Ledger
from lmms_stream.train.checkpoint.checkpoint import checkpoints
from lmms_stream.train.report.train_log import DIGESTS_NAME, read_digests, read_log

from tests.conftest import run_cli, write_tokens
from tests.jobs.runs import train
from tests.train.runs import MODEL, train_settings

Ids = Counter[tuple[str, int]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three stretches: two ranks; one rank with other weights and two steps skipped; two with all of `b`."""
    folder = tmp_path_factory.mktemp("ledger")
    datasets = {}
    for name, num_samples in (("a", 90), ("b", 60)):
        write_tokens(folder / name, num_samples=num_samples)
        datasets[name] = {"remote": str(folder / name), "processor": {"type": "tokens"}, "packing_length": 256}
    settings = {"datasets": datasets, "model": {"config": MODEL}, "train": train_settings(folder / "x", global_batch=4)}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    output = folder / "run"
    train(config, output, "train.weights={a: 2, b: 1}", "train.max_steps=5", nproc=2)
    skipped = "train.skip_steps=[[6, 8]]"
    train(config, output, "train.weights={a: 1, b: 1}", "train.max_steps=9", skipped, nproc=1)
    train(config, output, "train.weights={b: 1}", "train.max_steps=13", "train.global_batch=6", skipped, nproc=2)
    return output


def logged(run: Path) -> list[Ids]:
    """The samples of each step that was trained, as the run logged them."""
    records = {record["step"]: record["sample_ids"] for record in read_log(run)}
    return [named(records[step]) for step in sorted(records)]


def named(ids: Any) -> Ids:
    return Counter((str(source), int(number)) for source, number in (text.split(":") for text in map(str, ids)))


def test_each_step_holds_what_the_run_logged(run: Path) -> None:
    ledger = Ledger(run)
    steps = [ledger.step(number) for number in range(ledger.stop)]
    found = [
        Counter((pack.source, sample_id) for pack in step.packs for sample_id in pack.sample_ids.tolist())
        for step in steps
        if not step.is_skipped
    ]
    assert [step.number for step in steps if step.is_skipped] == [6, 7]
    assert found == logged(run)
    worlds = [{pack.group for pack in step.packs} for step in steps]
    assert worlds == [{0, 1}] * 5 + [{0}] * 6 + [{0, 1}] * 4


def test_each_sample_is_where_the_run_logged_it(run: Path) -> None:
    ledger = Ledger(run)
    trained = [number for number in range(ledger.stop) if not ledger.step(number).is_skipped]
    expected: dict[tuple[str, int], list[int]] = {}
    for number, ids in zip(trained, logged(run), strict=True):
        for sample in ids.elements():
            expected.setdefault(sample, []).append(number)
    for source, num_samples in (("a", 90), ("b", 60)):
        for sample_id in range(num_samples):
            entries = ledger.sample(source, sample_id)
            steps = [entry.step for entry in entries if ledger.when(entry) == "trained"]
            assert steps == expected.get((source, sample_id), [])


def test_amounts_are_those_that_the_run_logged(run: Path) -> None:
    ledger = Ledger(run)
    amounts = ledger.amounts()
    total: Ids = sum(logged(run), Counter())
    lengths = {name: np.load(next((run.parent / name / "_lmms/lengths").glob("*.npy"))) for name in ("a", "b")}
    for name in ("a", "b"):
        read = {sample_id: count for (source, sample_id), count in total.items() if source == name}
        assert amounts[name].num_samples == sum(read.values())
        assert amounts[name].num_tokens == sum(int(lengths[name][each]) * count for each, count in read.items())
        assert amounts[name].num_seen + amounts[name].num_unseen + amounts[name].num_overlong == len(lengths[name])
    tokens = [record["tokens_seen"] for record in read_log(run)]
    assert sum(each.num_tokens for each in amounts.values()) == tokens[-1]
    skipped = [pack for number in (6, 7) for pack in ledger.step(number).packs]
    assert sum(each.num_skipped_tokens for each in amounts.values()) == sum(int(p.lengths.sum()) for p in skipped)


def test_a_checkpoint_is_a_ledger_of_the_run_before_it(run: Path) -> None:
    early = Ledger(checkpoints(run / "checkpoints")[0])
    assert early.stop <= 5
    assert len(early.plans.stretches) == 1
    assert Ledger(run / "checkpoints").stop == Ledger(run).stop == 15
    assert len(Ledger(run).plans.stretches) == 3
    assert Ledger(run).why_nowhere("a", 0) == "no step reads it: the weights of a give it no steps"
    history = open_history(str(run))
    *before, last = history.stretches
    without = {**last, "sources": {"b": last["sources"]["b"]}}
    ended = Ledger(replace(history, stretches=[*before, without])).why_nowhere("a", 0)
    assert re.fullmatch(r"a ended before: from step \d+ on the run has no such source", ended)


def test_the_command_says_what_a_step_held_where_a_sample_was_and_what_was_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = Ledger(run).step(3)
    said = json.loads(run_cli("ledger", str(run), "--step", "3", "--json").stdout)
    assert [pack["sample_ids"] for pack in said["packs"]] == [pack.sample_ids.tolist() for pack in entry.packs]
    sample = f"{entry.packs[0].source}:{entry.packs[0].sample_ids[0]}"
    said = json.loads(run_cli("ledger", str(run), "--sample", sample, "--json").stdout)
    assert 3 in [found["step"] for found in said["entries"]]
    shown = run_cli("ledger", str(run), "--step", "7", "--show").stdout
    assert "step 7, passed over by skip_steps" in shown
    assert "loss spans" in shown or "trained on" in shown
    assert "micro-batch" in run_cli("ledger", str(run), "--sample", sample).stdout
    of_all = run_cli("ledger", str(run)).stdout
    for words in ("samples read, with repeats", "distinct samples to come", "overlong samples in no pack"):
        assert words in of_all
    assert "planned" not in of_all
    print_amounts(Ledger(replace(open_history(str(run)), stop=12)), 14, as_json=False)
    assert "steps before 14; steps 12 to 13 are planned, not read" in capsys.readouterr().out


def verified_run(run: Path, *, status: int) -> dict[str, Any]:
    found = run_cli("ledger", str(run), "--verify", "--json")
    assert found.returncode == status
    return dict(json.loads(found.stdout))


def test_the_command_compares_each_step_with_what_the_run_wrote_and_names_the_first_difference(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    counts = {"num_steps": 13, "num_digests": 13, "num_records": 13}
    assert verified_run(copy, status=0) == counts | {"difference": None}
    text = run_cli("ledger", str(copy), "--verify").stdout
    assert "13 steps, 13 of them with a digest, 13 with a record in the log: no difference" in text
    log, digests = (copy / "train_log.jsonl").read_text(), (copy / DIGESTS_NAME).read_bytes()
    lines = [json.loads(line) for line in log.splitlines()]
    lines[8]["samples_seen"] += 1
    (copy / "train_log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = verified_run(copy, status=1)["difference"]
    assert re.fullmatch(r"step 10 \(the log's 9\) has samples_seen \d+, and the plan \d+", found)
    (copy / DIGESTS_NAME).write_bytes(digests[:48] + digests[56:64] + digests[48:56] + digests[64:])
    found = verified_run(copy, status=1)["difference"]
    assert re.fullmatch(
        r"step 8 \(the log's 7\) read other samples \(digest [0-9a-f]{16}\) than the plan has \([0-9a-f]{16}\)", found
    )
    (copy / "train_log.jsonl").unlink()
    (copy / DIGESTS_NAME).write_bytes(digests[:48])
    assert verified_run(copy, status=0) == counts | {"num_digests": 6, "num_records": 0, "difference": None}
    (copy / DIGESTS_NAME).unlink()
    refused = " ".join(run_cli("ledger", str(copy), "--verify").stderr.split())
    assert "there is no step_digests.bin or train_log.jsonl next to it" in refused


def test_digests_are_written_without_a_log_and_cut_at_a_resume(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for step in (9, 13):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    (copy / "train_log.jsonl").unlink()
    no_log = ("train.logging_steps=no", "train.log_sample_ids=false")
    settings = ("train.weights={a: 1, b: 3}", "train.max_steps=7", *no_log)
    train(run.parent / "run.yaml", copy, *settings, nproc=2)
    assert len(read_digests(copy)) == 7
    assert read_digests(copy)[:5] == read_digests(run)[:5]
    assert verified_run(copy, status=0) == {"num_steps": 7, "num_digests": 7, "num_records": 0, "difference": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sample", "c:1"], "the run has no source 'c': choose one of a, b"),
        (["--sample", "a:90"], "sample 90 asked of a dataset with samples [0, 90)"),
        (["--sample", "17"], "--sample 17: expected SOURCE:ID, with one of the sources a, b"),
        (["--url", "a"], "--url a: expected SOURCE=URL"),
        (["--drop", "nowhere.txt"], "the drop list nowhere.txt cannot be read"),
        (["--step", "1", "--sample", "a:1"], "--step and --sample are questions of their own: ask one at a time"),
        (["--until", "3", "--show"], "--show prints samples of --step or --sample: name one of them"),
        (["--url", "c=x"], "--url c: the run has no such source, only a, b"),
        (["--step", "1", "--until", "3"], "--until selects steps, of a sample or of all samples: leave it out"),
        (["--until", "999999"], "--until 999999: the run ends before step"),
        (["--step", "1", "--renamed", "x"], "--renamed needs --sample: name a sample"),
    ],
)
def test_what_a_run_has_not_is_refused(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", str(run), *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_run_without_checkpoints_or_with_another_dataset_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete checkpoint: name a checkpoint, or the output_dir"):
        Ledger(tmp_path)
    with pytest.raises(CursorError, match="they differ in the lengths index"):
        Ledger(run, urls={"a": str(run.parent / "b")})


def test_what_would_have_to_be_trained_again_is_the_first_step_with_any_of_the_samples(
    run: Path, tmp_path: Path
) -> None:
    ledger = Ledger(run)
    trained = [number for number in range(ledger.stop) if not ledger.step(number).is_skipped]
    first: dict[tuple[str, int], int] = {}
    for number, ids in zip(trained, logged(run), strict=True):
        for sample in ids:
            first.setdefault(sample, number)
    late = [sample for sample, number in first.items() if number >= 8]
    found = ledger.first_step(late)
    assert found is not None
    assert found.step == min(first[sample] for sample in late)
    assert found.num_steps == ledger.stop - found.step
    assert found.checkpoint is not None
    assert Ledger(found.checkpoint).stop <= found.step
    drop = tmp_path / "drop.txt"
    noted = json.dumps({"source": late[1][0], "sample_id": late[1][1], "reason": "as a run notes it"})
    drop.write_text("# some\n" + "".join(f"{source}:{number}\n" for source, number in late) + noted + "\n")
    said = json.loads(run_cli("ledger", str(run), "--drop", str(drop), "--json").stdout)
    assert said["retraining"]["step"] == found.step
    drop.write_text("# none\n")
    with pytest.raises(ConfigError, match=r"drop.txt names no samples: write a line for each, SOURCE:ID or FILE:ROW"):
        ledger.listed(drop)
    early = run_cli("ledger", str(run), "--sample", "{}:{}".format(*next(iter(first)))).stdout
    assert "there is no earlier checkpoint: start again from step 0" in " ".join(early.split())


def test_samples_that_were_left_out_say_so(run: Path) -> None:
    history = open_history(str(run))
    step = Ledger(history).step(3)
    source, sample_id = step.packs[0].source, int(step.packs[0].sample_ids[0])
    left_out = LeftOut([LeftOutSample(source, sample_id, "an image that cannot be decoded", 3, "quarantined")])
    ledger = Ledger(replace(history, state={**history.state, "left_out": left_out.state_dict()}))
    (entry, *_) = ledger.sample(source, sample_id)
    assert (entry.step, ledger.when(entry, (source, sample_id))) == (3, "quarantined")
    assert ledger.amounts()[source].num_quarantined == 1
    assert ledger.amounts(3)[source].num_quarantined == 0
    with_it = Ledger(history).first_step([(source, sample_id)])
    assert with_it is not None
    assert with_it.step == 3
    assert ledger.first_step([(source, sample_id)]) is None  # it was padding whenever its turn came


def test_of_lanes_the_ledger_says_what_their_log_does(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"remote": str(run.parent / "a"), "processor": {"type": "tokens"}, "packing_length": 256}
    settings = {
        "dataset": data | {"packing_mode": "lanes", "num_canonical_nodes": 2, "packing_window": 16},
        "model": {"config": MODEL},
        "train": train_settings(tmp_path / "x", global_batch=4) | {"max_steps": 4},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    train(config, tmp_path / "run", nproc=1)
    said = json.loads(run_cli("ledger", str(tmp_path / "run"), "--step", "2", "--json").stdout)
    assert said["sample_ids"] == read_log(tmp_path / "run")[2]["sample_ids"]
    sample = str(said["sample_ids"][0])
    checkpoint = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    found = json.loads(run_cli("ledger", str(checkpoint), "--sample", f"data:{sample}", "--json").stdout)
    assert 2 in found["steps"][sample]
    assert "of steps to come, of ranks and micro-batches" in found["note"]
    assert "samples:" in run_cli("ledger", str(tmp_path / "run")).stdout
    with pytest.raises(CheckpointError, match="has no history of its run: it was saved by an earlier release, or"):
        Ledger(checkpoint)
    for arguments, message in (
        (["--step", "4"], "step 4 is not in"),
        (["--sample", "a:b"], "--sample a:b: expected an ID; a run in lanes has one source"),
        (["--step", "1", "--show"], "--show and --renamed need the datasets"),
        (["--until", "1"], "--until needs the contents of packs, but"),
        (["--url", "data=elsewhere"], "belongs to a run in lanes, whose contents are only in the log: leave it"),
    ):
        assert main(["ledger", str(tmp_path / "run"), *arguments]) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    log = tmp_path / "run" / "train_log.jsonl"
    log.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 5)))
    assert "has no sample ids" in run_cli("ledger", str(checkpoint), "--step", "1").stderr
    log.unlink()
    assert "there is no train_log.jsonl next to it" in " ".join(run_cli("ledger", str(checkpoint)).stderr.split())
