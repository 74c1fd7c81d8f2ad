"""What is drawn of runs' logs, read back from the axes of the figure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.cli.plots import DEFAULT_METRICS, X_AXES, draw_runs, running_mean, save_figure
from lmms_stream.errors import ConfigError, DataError, StorageError
from lmms_stream.train.run.distributed import end_distributed

from ..conftest import run_cli, write_tokens
from ..train.runs import trainer_of, write_run
from .test_cli import subparsers

START = {b"\x89PNG": ".png", b"<?xml": ".svg", b"%PDF-": ".pdf"}


def record(step: int, loss: float | None, *, num_steps: int = 1) -> dict[str, Any]:
    """As a trainer logs a step of 100 tokens and 2 s; a half of the figures that it logs."""
    return {
        "step": step,
        "epoch": step / 10,
        "loss": loss,
        "grad_norm": 1 / step,
        "num_steps": num_steps,
        "num_tokens": 100 * num_steps,
        "seconds": 2.0 * num_steps,
        "perf/tokens_per_s": 50.0,
        "perf/packing_efficiency": 0.99,
        "data/wait_share": 0.01 * step,
        "learning_rate": 1e-3,
        "tokens_seen": 100 * step,
        "samples_seen": 3 * step,
        "num_skipped_steps": 0,
    }


def write_log(folder: Path, records: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "train_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def drawn(figure: Any) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """By the title of the axes, then by the label of the line: its points."""
    return {
        axes.get_title(): {
            str(line.get_label()): (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
            for line in axes.get_lines()
        }
        for axes in figure.axes
    }


def legend(figure: Any) -> list[str]:
    (found,) = figure.legends
    return [text.get_text() for text in found.get_texts()]


def test_a_run_is_drawn_as_it_was_logged(tmp_path: Path) -> None:
    run = write_log(tmp_path / "chat", [record(1, 4.0), record(2, 3.0), {"step": 2, "eval_loss": 3.5}, record(3, 2.5)])
    for path in (run, run / "train_log.jsonl"):
        figure = draw_runs([path])
        lines = drawn(figure)
        assert tuple(lines) == DEFAULT_METRICS
        assert lines["loss"] == {"chat": ([1, 2, 3], [4, 3, 2.5]), "chat, eval_loss": ([2], [3.5])}
        assert lines["grad_norm"] == {"chat": ([1, 2, 3], [1, 1 / 2, 1 / 3])}
        assert lines["data/wait_share"] == {"chat": ([1, 2, 3], [0.01, 0.02, 0.03])}
        assert legend(figure) == ["chat", "chat, eval_loss"]
        points = figure.axes[0].get_lines()[1]
        assert (points.get_marker(), points.get_linestyle()) == ("o", "None")


def test_runs_lie_side_by_side_each_in_its_colour(tmp_path: Path) -> None:
    old = {name: value for name, value in record(1, 4.0).items() if name != "data/wait_share"}
    runs = [
        write_log(tmp_path / "a" / "out", [record(1, 4.0), record(2, 3.0)]),
        write_log(tmp_path / "b" / "out", [old]),
        write_log(tmp_path / "$x$", [record(4, 1.0)]),
    ]
    third = rf"{tmp_path.name}/\$x\$"
    figure = draw_runs([*runs, runs[0] / "train_log.jsonl"])
    assert {metric: list(lines) for metric, lines in drawn(figure).items()} == {
        metric: ["a/out", *["b/out"] * (metric != "data/wait_share"), third] for metric in DEFAULT_METRICS
    }
    for axes in figure.axes:
        found = {line.get_label(): line.get_color() for line in axes.get_lines()}
        assert found.items() <= {("a/out", "C0"), ("b/out", "C1"), (third, "C2")}
    assert legend(figure) == ["a/out", "b/out", third]


def test_a_long_run_is_a_line_and_a_short_one_has_its_points_marked(tmp_path: Path) -> None:
    runs = [write_log(tmp_path / f"_{last}", [record(step, 1.0) for step in range(1, last + 1)]) for last in (29, 30)]
    figure = draw_runs(runs)
    assert [line.get_marker() for line in figure.axes[0].get_lines()] == [".", "None"]
    assert legend(figure) == ["./_29", "./_30"]


def test_metrics_are_chosen_and_unknown_ones_named_with_those_there_are(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", [record(1, 4.0) | {"loss/chats": 5.0, "sample_ids": [1, 2]}])
    other = write_log(tmp_path / "other", [record(1, 2.0), {"step": 1, "eval_loss": 3.0}])
    lines = drawn(draw_runs([run, other], metrics=["loss/chats", "eval_loss"]))
    assert lines == {"loss/chats": {"run": ([1], [5])}, "eval_loss": {"other, eval_loss": ([1], [3])}}
    there = (
        "epoch, loss, grad_norm, num_steps, .*, learning_rate, tokens_seen, samples_seen, num_skipped_steps, loss/chats"
    )
    for metrics, named in ((["loss", "smell"], "smell"), (["sample_ids", "step"], "sample_ids, step"), ([], "loss, ")):
        with pytest.raises(ConfigError, match=f"no run has {named}.*: choose from {there}$"):
            draw_runs([run], metrics=metrics)


@pytest.mark.parametrize(
    ("x", "label", "positions", "evaluated"),
    [
        ("step", "step", [10, 20, 40], [25, 40]),
        ("tokens", "tokens_seen", [1000, 2000, 4000], [2500, 4000]),
        ("samples", "samples_seen", [30, 60, 120], [75, 120]),
        ("epoch", "epoch", [1, 2, 4], [2.5, 4]),
        ("hours", "hours", [20 / 3600, 40 / 3600, 80 / 3600], [50 / 3600, 80 / 3600]),
    ],
)
def test_the_x_axis_counts_what_is_asked_for(
    x: str, label: str, positions: list[float], evaluated: list[float], tmp_path: Path
) -> None:
    """An evaluation between two records lies between them."""
    records = [record(10, 4.0, num_steps=10), record(20, 3.0, num_steps=10), {"step": 25, "eval_loss": 3.5}]
    records += [record(40, 2.0, num_steps=20), {"step": 40, "eval_loss": 2.5}]
    figure = draw_runs([write_log(tmp_path / "run", records)], x=x)
    assert {axes.get_xlabel() for axes in figure.axes} == {label}
    lines = drawn(figure)["loss"]
    assert lines["run"][0] == pytest.approx(positions)
    assert lines["run, eval_loss"][0] == pytest.approx(evaluated)


def test_an_x_axis_that_the_log_does_not_have_is_an_error(tmp_path: Path) -> None:
    mixed = [{"epoch/a": 1.0, "epoch/b": 2.0, "step": 1, "num_steps": 1, "loss": 2.0}]
    run = write_log(tmp_path / "run", mixed)
    with pytest.raises(DataError, match="the log of run has no epoch for the x-axis: choose another"):
        draw_runs([run], x="epoch")
    with pytest.raises(ConfigError, match="no x-axis 'smell': choose one of step, tokens, samples, epoch, hours"):
        draw_runs([run], x="smell")
    (option,) = (action for action in subparsers()["plot"]._actions if action.dest == "x")
    assert option.choices is not None
    assert list(option.choices) == list(X_AXES)


def test_what_was_not_finite_is_a_gap(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", [record(1, 4.0), record(2, None), record(3, float("nan")), record(4, 1.0)])
    at, values = drawn(draw_runs([run]))["loss"]["run"]
    assert at == [1, 2, 3, 4]
    assert np.isnan(values).tolist() == [False, True, True, False]


def test_smoothing_draws_means_before_what_was_logged(tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", [record(step, loss) for step, loss in enumerate([4.0, 2.0, 3.0, 1.0], start=1)])
    figure = draw_runs([run], smooth=2)
    lines = drawn(figure)
    assert lines["loss"] == {"run, as logged": ([1, 2, 3, 4], [4, 2, 3, 1]), "run": ([1, 2, 3, 4], [4, 3, 2.5, 2])}
    assert list(lines["learning_rate"]) == ["run"]
    assert legend(figure) == ["run"]
    with pytest.raises(ConfigError, match="smooth must be at least 1 record, got 0"):
        draw_runs([run], smooth=0)


def test_a_running_mean_is_of_what_is_finite() -> None:
    values = np.array([1.0, np.nan, 3.0, np.inf, 1e30, 2.0, 4.0])
    assert running_mean(values, 1).tolist() == pytest.approx([1, np.nan, 3, np.nan, 1e30, 2, 4], nan_ok=True)
    assert running_mean(values, 2).tolist() == pytest.approx([1, 1, 3, 3, 1e30, 5e29, 3], nan_ok=True)
    assert running_mean(np.array([np.nan, np.nan, 6.0]), 9).tolist() == pytest.approx([np.nan, np.nan, 6], nan_ok=True)


def test_a_real_run_that_was_killed_and_resumed_is_drawn_once(tmp_path: Path) -> None:
    """Its checkpoint of step 4 is lost: it goes on from step 2, and logs steps 3 and 4 again, at other rates."""
    write_tokens(tmp_path / "data", num_samples=120)
    path = write_run(tmp_path / "run.yaml", tmp_path / "data", save_steps=2, output_dir=str(tmp_path / "out"))
    trainer_of(path, "train.max_steps=4").train()
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000004")
    trainer_of(path, "train.max_steps=6").train()
    end_distributed()
    log = [json.loads(line) for line in (tmp_path / "out" / "train_log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3, 4, 3, 4, 5, 6]
    lines = drawn(draw_runs([tmp_path / "out"]))
    assert set(lines) == set(DEFAULT_METRICS)
    for metric in DEFAULT_METRICS:
        at, values = lines[metric]["out"]
        assert at == [1, 2, 3, 4, 5, 6]
        assert values == [record[metric] for record in (*log[:2], *log[4:])]
    assert log[2]["learning_rate"] != log[4]["learning_rate"]


@pytest.mark.parametrize("start", START)
def test_the_suffix_says_the_format(start: bytes, tmp_path: Path) -> None:
    run = write_log(tmp_path / "run", [record(1, 4.0), record(2, 3.0)])
    path = tmp_path / "new" / f"plot{START[start]}"
    save_figure(draw_runs([run]), path)
    assert path.read_bytes().startswith(start)


def test_a_plot_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    figure = draw_runs([write_log(tmp_path / "run", [record(1, 4.0)])])
    for name in ("plot.xyz", "plot"):
        with pytest.raises(
            ConfigError, match=rf"{name}: plots are files with the suffixes .png, .svg, .pdf: choose one of them"
        ):
            save_figure(figure, tmp_path / name)
    with pytest.raises(StorageError, match=r"run/train_log.jsonl/plot.png: .*: check the path and its rights"):
        save_figure(figure, tmp_path / "run" / "train_log.jsonl" / "plot.png")
    (tmp_path / "full.png").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"full.png: no room on the disk .*: free some, or name another file"):
        save_figure(figure, tmp_path / "full.png")


def test_without_matplotlib_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_log(tmp_path / "run", [record(1, 4.0)])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'lmms-stream\[demo\]'"):
        draw_runs([run])


def test_what_is_no_log_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    damaged = write_log(tmp_path / "damaged", [record(1, 4.0)])
    (damaged / "train_log.jsonl").write_text('{"step": 1, "num_steps": 1}\n{"step": 2, "lo\n')
    begun = write_log(tmp_path / "begun", [])
    plot = tmp_path / "plot.png"
    for run, message in (
        (tmp_path / "none", "none: no log found: name the output_dir of a started run, or its log"),
        (tmp_path / "empty", "empty/train_log.jsonl: no log found"),
        (begun, "begun/train_log.jsonl has no record yet: plot it after the first record"),
        (damaged, "damaged/train_log.jsonl:2: not a record of a run (Unterminated string"),
    ):
        result = run_cli("plot", str(run), "--output", str(plot))
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line
    assert not plot.exists()


def test_the_command_draws_without_torch(tmp_path: Path) -> None:
    runs = [str(write_log(tmp_path / name, [record(1, 4.0), record(2, 3.0)])) for name in "ab"]
    plot = str(tmp_path / "plot.svg")
    options = ["--metrics", "loss,num_tokens", "--x", "tokens", "--smooth", "2", "--output", plot]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lmms_stream", "plot", *runs, *options],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stdout == f"{runs[0]}, {runs[1]} -> {plot}\n"
    assert "num_tokens" in Path(plot).read_text()
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "matplotlib.figure" in imported
    assert not imported & {"torch", "transformers", "streaming", "pyarrow", "boto3"}
