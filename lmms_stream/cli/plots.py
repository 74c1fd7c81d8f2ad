"""Figures by matplotlib: the logs of runs, side by side, and files of figures. train_log.jsonl -> history -> figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..checks import is_number
from ..errors import ConfigError, DataError
from ..storage.failures import disk_errors
from ..train.report.train_log import LOG_NAME, history, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def new_figure(*, width: float, height: float) -> Figure:
    """Return an empty figure of this size, in inches; ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'lmms-stream[demo]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the suffix of `path`.

    ConfigError for a suffix not in SUFFIXES, StorageError for an error of the disk.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path}: plots are files with the suffixes {', '.join(SUFFIXES)}: choose one of them")
    with disk_errors(str(path), room="free some, or name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=suffix[1:])


DEFAULT_METRICS = (
    "loss", "learning_rate", "grad_norm", "perf/tokens_per_s", "perf/packing_efficiency", "data/wait_share",
)  # fmt: skip
X_AXES = {"step": "step", "tokens": "tokens_seen", "samples": "samples_seen", "epoch": "epoch", "hours": "seconds"}
SHARES = ("perf/packing_efficiency", "perf/padding_share", "perf/mfu", "data/wait_share")
EVALUATION = "eval_loss"
_MOST_COLUMNS = 3
_FEW = 30  # maximum records with a mark each

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCurves:
    """Figures of a run's log over its steps. metrics: their names, in order."""

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    metrics: list[str]

    def curve(self, metric: str, *, x: str) -> tuple[Floats, Floats]:
        """Return positions of a metric's records on the x-axis, and their values, NaN for null."""
        records = [record for record in (*self.steps, *self.evaluations) if metric in record]
        steps = np.array([record["step"] for record in records], np.float64)
        values = [record[metric] if is_number(record[metric]) else np.nan for record in records]
        return self._positions(steps, x=x), np.array(values, np.float64)

    def _positions(self, steps: Floats, *, x: str) -> Floats:
        """Return positions of steps on the x-axis; evaluation steps without a training record are interpolated."""
        if x == "step":
            return steps
        known = [record for record in self.steps if is_number(record.get(X_AXES[x]))]
        if not known:
            raise DataError(f"the log of {self.name} has no {X_AXES[x]} for the x-axis: choose another")
        positions = np.array([record[X_AXES[x]] for record in known], np.float64)
        if x == "hours":
            positions = np.cumsum(positions) / 3600
        return np.interp(steps, [record["step"] for record in known], positions)


def draw_runs(
    paths: Sequence[Path], *, metrics: Sequence[str] | None = None, x: str = "step", smooth: int = 1
) -> Figure:
    """Draw axes for each of `metrics` (default: the existing metrics of DEFAULT_METRICS), with a line for each run.

    paths: output_dirs of runs, or their logs. x: one of X_AXES; hours are hours of training. smooth: number of records
    in the mean at each point, up to the point's own record; logged values are faint then. Losses of evaluations are
    points beside the loss. ConfigError for a metric in no run, and without matplotlib; DataError for a file that is no
    log.
    """
    if x not in X_AXES:
        raise ConfigError(f"no x-axis {x!r}: choose one of {', '.join(X_AXES)}")
    if smooth < 1:
        raise ConfigError(f"smooth must be at least 1 record, got {smooth}")
    runs = read_runs(paths)
    chosen = _choose(metrics, list(dict.fromkeys(name for run in runs for name in run.metrics)))
    num_columns = min(_MOST_COLUMNS, len(chosen))
    num_rows = -(-len(chosen) // num_columns)
    figure = new_figure(width=1 + 4.5 * num_columns, height=1 + 3 * num_rows)
    drawn: dict[str, Any] = {}
    for number, metric in enumerate(chosen, start=1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        axes.set(title=metric, xlabel="hours" if x == "hours" else X_AXES[x])
        if metric in SHARES:
            axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")
        for number, run in enumerate(runs):
            drawn |= _draw(axes, run, metric, x=x, smooth=smooth, color=f"C{number}")
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(4, len(drawn)))
    return figure


def read_runs(paths: Sequence[Path]) -> list[RunCurves]:
    """Read the runs at `paths`, each once, named by the last parts of their paths, enough for distinct names."""
    resolved = [path.resolve() for path in paths]
    runs = list(dict.fromkeys(path.parent if path.name == LOG_NAME else path for path in resolved))
    longest = max(len(path.parts) for path in runs)
    names_by_depth = (["/".join(path.parts[-depth:]) for path in runs] for depth in range(1, longest + 1))
    names = next(names for names in names_by_depth if len(set(names)) == len(names))
    return [_read(path, name=name) for path, name in zip(runs, names, strict=True)]


def running_mean(values: Floats, count: int) -> Floats:
    """Return the mean of each value and the count - 1 values before it, of existing finite values; NaN without any.

    >>> running_mean(np.array([1.0, 3.0, np.nan, 7.0]), 2).tolist()
    [1.0, 2.0, 3.0, 7.0]
    """
    windows = (values[max(0, end - count) : end] for end in range(1, len(values) + 1))
    finite = (window[np.isfinite(window)] for window in windows)
    return np.array([window.mean() if len(window) else np.nan for window in finite], np.float64)


def _read(path: Path, *, name: str) -> RunCurves:
    with disk_errors(str(path)):
        log = path / LOG_NAME if path.is_dir() else path
        if not log.exists():
            raise DataError(f"{log}: no log found: name the output_dir of a started run, or its log")
    steps, evaluations = history(read_log(log))
    records = [*steps, *evaluations]
    if not records:
        raise DataError(f"{log} has no record yet: plot it after the first record")
    metrics = dict.fromkeys(key for record in records for key, value in record.items() if is_number(value))
    return RunCurves(
        name=name, steps=steps, evaluations=evaluations, metrics=[metric for metric in metrics if metric != "step"]
    )


def _choose(metrics: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    if metrics is None:
        chosen = [metric for metric in (*DEFAULT_METRICS, EVALUATION) if metric in there]
        if "loss" in chosen and EVALUATION in chosen:
            chosen.remove(EVALUATION)  # drawn beside the loss
    else:
        chosen = [metric for metric in dict.fromkeys(metrics) if metric in there]
    unknown = [metric for metric in metrics or () if metric not in there]
    if unknown or not chosen:
        raise ConfigError(
            f"no run has {', '.join(unknown or DEFAULT_METRICS)}: choose from {', '.join(there) or 'nothing'}"
        )
    return chosen


def _draw(axes: Axes, run: RunCurves, metric: str, *, x: str, smooth: int, color: str) -> dict[str, Any]:
    """Draw a figure of a run; return the drawn lines by their names in the legend."""
    drawn = {}
    name = run.name.replace("$", r"\$")  # $ begins a formula, and a leading _ hides the name in the legend
    name = f"./{name}" if name.startswith("_") else name
    if metric in run.metrics and metric != EVALUATION:
        at, values = run.curve(metric, x=x)
        marker = "." if len(values) < _FEW else None
        if smooth > 1 and metric != "learning_rate":  # a mean would only delay the learning rate
            axes.plot(at, values, color=color, alpha=0.25, zorder=1, label=f"{name}, as logged")
            values = running_mean(values, smooth)
        (drawn[name],) = axes.plot(at, values, color=color, marker=marker, label=name)
    if metric in ("loss", EVALUATION) and EVALUATION in run.metrics:
        label = f"{name}, {EVALUATION}"
        at, values = run.curve(EVALUATION, x=x)
        (drawn[label],) = axes.plot(at, values, "o", color=color, markeredgecolor="black", label=label)
    return drawn
