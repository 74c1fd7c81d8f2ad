"""What a run warns of: spikes of the loss, gradients that are not finite, waiting; and how packs are passed over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lmms_stream.errors import ConfigError
from lmms_stream.mds.provenance import packed_rows, write_provenance
from lmms_stream.train.report.alerts import FEWEST, Episode, Spikes
from lmms_stream.train.report.train_log import read_log
from transformers import TrainerCallback

from ..conftest import TokensAndSpans, write_samples, write_tokens
from ..jobs.runs import train
from .runs import trainer_of, write_run


def repeated(number: int, length: int) -> TokensAndSpans:
    """A sample of one of four tokens, which a model learns soon."""
    return np.full(length, number % 4, np.int32), np.array([[0, length]], np.int32)


def spoiled_run(folder: Path, *, step: int) -> tuple[Path, list[int]]:
    """A run with garbage instead of the samples of a step, as the loader counts it; and these samples."""
    lengths = np.random.default_rng(7).integers(20, 60, 640).tolist()
    samples = [repeated(number, length) for number, length in enumerate(lengths)]
    write_samples(folder / "planned", samples)
    path = write_run(
        folder / "run.yaml", folder / "data", max_steps=step + 4, save_steps=step // 2, global_batch=2,
        learning_rate=1e-2, log_sample_ids=False,
    )  # fmt: skip
    mixture = trainer_of(path, f"dataset.remote={folder / 'planned'}").loader.mixture
    before = mixture.skip(mixture.start(), step, global_batch=2)
    bad = sorted(mixture.packs(mixture.step(before, global_batch=2).ranges).sample_ids.tolist())
    rng = np.random.default_rng(8)
    for number in bad:
        samples[number] = rng.integers(0, 512, lengths[number], np.int32), samples[number][1]
    write_samples(folder / "data", samples)  # of the same lengths, so the plan stays
    rows = packed_rows(0, np.arange(len(samples)))
    write_provenance(folder / "data", [rows], ["chats.jsonl"], num_samples=len(samples))
    return path, bad


def alerts_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {record["step"]: record["alerts"] for record in read_log(folder) if "alerts" in record}


def test_bad_samples_are_a_spike_whose_alert_names_the_line_that_passes_them_over(
    tmp_path: Path,
) -> None:
    """Two ranks read the bad samples, one each half of them; one process goes on."""
    path, bad = spoiled_run(tmp_path, step=FEWEST)
    said = train(path, tmp_path / "default")
    found = alerts_of(tmp_path / "default")
    assert list(found) == [21]
    (alert,) = found[21]
    assert alert["kind"] == "loss_spike"
    assert (alert["first_step"], alert["last_step"]) == (21, 21)
    assert alert["packs"] == [{"source": "data", "epoch": 0, "first": 40, "stop": 42}]
    assert alert["sample_ids"] == bad
    assert alert["rows"] == [f"chats.jsonl:{number + 1}" for number in bad[:10]]
    assert f", which were made of chats.jsonl:{bad[0] + 1}, chats.jsonl:{bad[1] + 1}" in alert["message"]
    assert said.count(alert["message"]) == 1  # by rank 0 alone
    told = yaml.safe_load(alert["message"][alert["message"].index("train: {") :])
    assert told == {"train": {"skip_steps": [[20, 21]]}} == {"train": {"skip_steps": alert["skip_steps"]}}

    checkpoint = tmp_path / "default" / "checkpoints" / "step-00000020"
    resumed = tmp_path / "resumed"
    trainer_of(
        path, f"train.resume={checkpoint}", f"train.skip_steps={told['train']['skip_steps']}",
        f"train.output_dir={resumed}", "train.log_sample_ids=true",
    ).train()  # fmt: skip
    first, again = read_log(tmp_path / "default"), read_log(resumed)
    assert [record["step"] for record in again] == [*range(21, 25)]
    assert not {*bad} & {number for record in again for number in record["sample_ids"]}
    spikes = Spikes(deviations=6, window=100)
    assert not any(spikes.take(record["loss"]) for record in (*first[:20], *again))
    assert first[20]["loss"] > 1.5 * max(record["loss"] for record in again)


def test_a_spike_in_records_of_several_steps_is_told_with_all_of_them(tmp_path: Path) -> None:
    path, bad = spoiled_run(tmp_path, step=44)
    trainer_of(path, "train.logging_steps=2", "train.skip_steps=[[1, 2]]").train()
    found = alerts_of(tmp_path / "default")
    assert list(found) == [44]
    (alert,) = found[44]
    assert (alert["first_step"], alert["last_step"]) == (43, 44)
    assert alert["skip_steps"] == [[1, 2], [43, 45]]  # one was passed over, so the loader is a step further
    assert alert["packs"] == [{"source": "data", "epoch": 0, "first": 86, "stop": 90}]
    assert {*bad} < {*alert["sample_ids"]}


class Logged(TrainerCallback):
    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.alerts += kwargs["logs"].get("alerts", [])


def test_gradients_that_are_not_finite_are_told_by_doubling_and_given_to_callbacks(tmp_path: Path) -> None:
    """The first update, at this learning rate, makes every later gradient NaN."""
    write_tokens(tmp_path / "data", num_samples=300)
    path = write_run(
        tmp_path / "run.yaml", tmp_path / "data", max_steps=7, learning_rate=1e38, lr_scheduler_type="constant",
        global_batch=2,
    )  # fmt: skip
    logged = Logged()
    trainer_of(path, callbacks=[logged]).train()
    found = alerts_of(tmp_path / "default")
    assert [(step, alert["kind"], alert["first_step"], alert["skip_steps"]) for step, (alert,) in found.items()] == [
        (2, "gradient_not_finite", 2, [[1, 2]]),
        (3, "gradient_not_finite", 2, [[1, 3]]),
        (5, "gradient_not_finite", 2, [[1, 5]]),
    ]
    assert logged.alerts == [alert for (alert,) in found.values()]


def test_waiting_for_data_is_told(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data", num_samples=300)
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=FEWEST + 1, global_batch=1)
    trainer_of(path, "train.alerts.wait_share=0").train()
    ((alert,),) = [alerts for step, alerts in alerts_of(tmp_path / "default").items() if step == FEWEST]
    assert alert["kind"] == "waiting_for_data"
    assert "raise train.num_workers (now 0), or see data/downloaded_mb_per_s" in alert["message"]


def test_normal_noise_is_no_spike_and_a_rise_is_one() -> None:
    rng = np.random.default_rng(0)
    falling = 2 + 8 * np.exp(-np.arange(2000) / 300) + rng.normal(0, 0.05, 2000)
    spikes = Spikes(deviations=6, window=100)
    assert not any(spikes.take(loss) for loss in falling)
    assert not spikes.take(math.nan)
    assert spikes.take(2.6)
    assert not spikes.take(2.0)
    stays = [spikes.take(4.0 + noise) for noise in rng.normal(0, 0.05, 100)]
    assert stays[0]
    assert not stays[-1]  # it is the ordinary level now
    assert not any(Spikes(deviations=6, window=9).take(loss) for loss in [1.0] * (FEWEST - 1) + [100.0])
    never = Spikes(deviations=0, window=100)
    assert not any(never.take(loss) for loss in [1.0] * 50 + [100.0])


def test_what_lasts_is_told_by_doubling_and_at_its_end() -> None:
    episode = Episode()
    assert [episode.go_on() for _ in range(9)] == [True, True, False, True, False, False, False, True, False]
    assert episode.end()
    assert not episode.end()
    assert episode.go_on()
    assert not episode.end()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("alerts.spike=-1", r"train.alerts.spike must be 0 or more, got -1"),
        ("alerts.wait_share=-0.5", r"train.alerts.wait_share must be 0 or more, got -0.5"),
    ],
)
def test_settings_of_alerts_that_cannot_be_are_refused(setting: str, message: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", max_steps=1)
    with pytest.raises(ConfigError, match=message):
        trainer_of(path, f"train.{setting}")
