"""Current view of a run: state, latest figures, curves, alerts, samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...train.report.train_log import ALERTS_NAME, History, keep
from .source import LogTail, RunSource

SILENT_S = 120.0  # without a record, a run may have ended; longer for runs with slow records
_MOST_ALERTS, _MOST_CHECKPOINTS, _MOST_SAMPLES = 50, 20, 200


class WatchedRun:
    """Watched run: `update` reads new records; `view` returns the current view as JSON values."""

    def __init__(self, source: RunSource):
        self.source = source
        self._tail = LogTail(source.log)
        self._slow = LogTail(source.log.with_name(ALERTS_NAME))
        self._between: list[dict[str, Any]] = []  # alerts between records
        self._kept = History([], [])
        self._samples: tuple[int, list[Any]] | None = None  # latest logged step with samples, and its samples

    def update(self) -> None:
        new = self._tail.read()
        if new.is_new_log:
            self._kept, self._samples = History([], []), None
        for record in new.records:
            if ids := record.pop("sample_ids", None):
                self._samples = record["step"], ids[:_MOST_SAMPLES]
            keep(self._kept, record)
        slow = self._slow.read()
        if slow.is_new_log:
            self._between = []
        self._between += [alert for record in slow.records for alert in record.get("alerts", [])]

    def view(self) -> dict[str, Any]:
        steps, evaluations = self._kept
        settings, saved = self.source.settings_now(), self.source.saved
        alerts = [alert for record in steps for alert in record.get("alerts", [])]
        alerts += [alert for alert in self._between if alert not in alerts]  # no record of them yet
        alerts.sort(key=lambda alert: alert.get("last_step", 0))
        latest = steps[-1] if steps else {}
        return {
            "name": self.source.name,
            "folder": str(self.source.log.parent),
            "state": state_of(latest, settings, silent_s=self._silent_s, has_log=self._tail.written_s is not None),
            "done": done_share(latest, settings),
            "figures": _figures(latest, evaluations[-1] if evaluations else {}, settings),
            "panels": panels_of(steps, evaluations),
            "alerts": [_short(alert) for alert in alerts[: -_MOST_ALERTS - 1 : -1]],
            "num_alerts": len(alerts),
            "num_damaged_lines": self._tail.num_damaged,
            "checkpoints": [path.name for path in saved[: -_MOST_CHECKPOINTS - 1 : -1]],
            "lists_checkpoints": self.source.checkpoints is not None,
            "samples": {"step": self._samples[0], "ids": self._samples[1]} if self._samples else None,
            "has_datasets": bool(self.source.datasets),
        }

    @property
    def _silent_s(self) -> float:
        return 0.0 if self._tail.written_s is None else time.time() - self._tail.written_s


def _short(alert: Mapping[str, Any]) -> dict[str, Any]:
    """Return an alert with the first _MOST_SAMPLES samples, and the skip_steps setting as a line of YAML."""
    shown = {name: alert.get(name, "") for name in ("kind", "message", "first_step", "last_step")}
    skipped = alert.get("skip_steps")
    return {
        **shown,
        "sample_ids": alert.get("sample_ids", [])[:_MOST_SAMPLES],
        "line": f"skip_steps: {skipped}" if skipped else None,
    }


def state_of(latest: Mapping[str, Any], settings: Mapping[str, Any], *, silent_s: float, has_log: bool) -> str:
    """State of a run in a few words. latest: last record of training, empty without records."""
    if not latest:
        return "has begun, and has no record yet" if has_log else "has not begun: there is no log yet"
    share = done_share(latest, settings)
    if share is not None and share >= 1:
        return f"finished at step {latest['step']:,}"
    if silent_s > max(SILENT_S, 5 * (number(latest.get("seconds")) or 0.0)):
        return f"no record for {_duration(silent_s)}: it may have ended at step {latest['step']:,}"
    return "training"


def done_share(latest: Mapping[str, Any], settings: Mapping[str, Any]) -> float | None:
    """Completed share of the run, 1 at the end; None if the settings do not determine the end."""
    epochs = [value for name, value in latest.items() if name == "epoch" or name.startswith("epoch/")]
    at = {"max_steps": latest.get("step"), "max_tokens": latest.get("tokens_seen")}
    at |= {"num_train_epochs": min(epochs, default=None)}
    for name, value in at.items():
        end = number(settings.get(name))
        if end and end > 0 and value is not None:  # transformers: max_steps is -1 if num_train_epochs applies
            return min(1.0, float(value) / end)
    return None


def _figures(
    latest: Mapping[str, Any], evaluation: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Latest figures by label, with units."""
    if not latest:
        return []
    end = settings.get("max_steps")
    of = f" of {end:,}" if isinstance(end, int) and end > 0 else ""
    share = {name: f"{value:.1%}" for name, value in latest.items() if number(value) is not None}
    steps = steps_per_s(latest)
    found = {
        "step": f"{latest['step']:,}{of}",
        "epoch": _with("{:.2f}", latest, "epoch"),
        "loss": _with("{:.4f}", latest, "loss"),
        "evaluation": f"{_with('{:.4f}', evaluation, 'eval_loss')} at step {evaluation['step']:,}"
        if evaluation
        else "",
        "learning rate": _with("{:.3g}", latest, "learning_rate"),
        "gradient norm": _with("{:.3g}", latest, "grad_norm"),
        "tokens/s": _with("{:,.0f}", latest, "perf/tokens_per_s"),
        "steps/s": "" if steps is None else f"{steps:.3g}",
        "MFU": share.get("perf/mfu", ""),
        "waiting for data": share.get("data/wait_share", ""),
        "imbalance": _with("{:.3f}", latest, "perf/cost_imbalance"),
        "packs filled": share.get("perf/packing_efficiency", ""),
        "memory": _with("{:,.0f} MiB", latest, "memory/process_mib"),
        "GPU memory": _with("{:,.0f} MiB", latest, "memory/cuda_peak_mib"),
        "tokens seen": _with("{:,.0f}", latest, "tokens_seen"),
        "samples seen": _with("{:,.0f}", latest, "samples_seen"),
        "steps without update": _with("{:,.0f}", latest, "num_skipped_steps"),
    }
    return [(label, text) for label, text in found.items() if text]


def _with(form: str, record: Mapping[str, Any], name: str) -> str:
    if name in record and record[name] is None:
        return "not finite"
    value = number(record.get(name))
    return "" if value is None else form.format(value)


def _duration(seconds: float) -> str:
    """
    >>> _duration(4000)
    '1 h 6 min'
    """
    minutes = int(seconds) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


# Records of a run -> curves with few enough points for a page. Values in, values out.

MAX_POINTS = 600  # of a curve
Record = Mapping[str, Any]
Unit = Literal["", "share", "rate", "MiB"]


class Panel(NamedTuple):
    """Curves on one axis. figures: functions by name, from a record to its value or None."""

    title: str
    unit: Unit
    figures: Mapping[str, Callable[[Record], float | None]]


def _figure(name: str) -> Callable[[Record], float | None]:
    return lambda record: number(record.get(name))


def steps_per_s(record: Record) -> float | None:
    seconds = number(record.get("seconds"))
    return record.get("num_steps", 1) / seconds if seconds else None


PANELS = (
    Panel("learning rate", "", {"learning rate": _figure("learning_rate")}),
    Panel("gradient norm", "", {"gradient norm": _figure("grad_norm")}),
    Panel("tokens a second", "rate", {"tokens/s": _figure("perf/tokens_per_s")}),
    Panel("steps a second", "rate", {"steps/s": steps_per_s}),
    Panel("model FLOPs utilization", "share", {"MFU": _figure("perf/mfu")}),
    Panel("TFLOP/s a device", "", {"TFLOP/s": _figure("perf/tflops_per_device")}),
    Panel("waiting for data", "share", {"share of the time": _figure("data/wait_share")}),
    Panel(
        "imbalance: busiest rank over mean", "",
        {"tokens": _figure("perf/cost_imbalance"), "media": _figure("perf/tower_imbalance")},
    ),
    Panel("memory of the largest process", "MiB", {"process": _figure("memory/process_mib")}),
    Panel("peak memory of a GPU", "MiB", {"tensors": _figure("memory/cuda_peak_mib")}),
    Panel("packing efficiency", "share", {"filled": _figure("perf/packing_efficiency")}),
)  # fmt: skip


def panels_of(steps: Sequence[Record], evaluations: Sequence[Record]) -> list[dict[str, Any]]:
    """Panels with values, as JSON values; the first panel is the loss, by source and objective."""
    losses = dict.fromkeys(name for record in steps for name in record if name == "loss" or name.startswith("loss/"))
    evaluated = dict.fromkeys(name for record in evaluations for name in record if _is_loss(name))
    loss = Panel("loss", "", {name: _figure(name) for name in losses})
    found = [_drawn(panel, steps) for panel in (loss, *PANELS)]
    found[0]["series"] += [
        {"name": name, "points": True, **thinned(curve_of(evaluations, _figure(name)))} for name in evaluated
    ]
    return [panel for panel in found if panel["series"]]


def _is_loss(name: str) -> bool:
    return name.startswith("eval_") and name.endswith("_loss")


def _drawn(panel: Panel, records: Sequence[Record]) -> dict[str, Any]:
    series = []
    for name, value in panel.figures.items():
        curve = curve_of(records, value)
        if any(y is not None for _, y in curve):
            series.append({"name": name, "points": False, **thinned(curve)})
    return {"title": panel.title, "unit": panel.unit, "series": series}


def curve_of(records: Sequence[Record], value: Callable[[Record], float | None]) -> list[tuple[int, float | None]]:
    """Steps and values; a record without the figure is a gap."""
    return [(record["step"], value(record)) for record in records]


def thinned(curve: Sequence[tuple[int, float | None]], most: int = MAX_POINTS) -> dict[str, list[Any]]:
    """Steps x and values y of a curve with at most `most` points: the minimum and maximum of each part.

    A spike of one step stays visible in a run of a million steps.
    """
    size = max(1, -(-2 * len(curve) // most))
    kept: list[tuple[int, float | None]] = []
    for at in range(0, len(curve), size):
        part = curve[at : at + size]
        finite = [point for point in part if point[1] is not None]
        if not finite:
            kept.append(part[0])
            continue
        ends = {min(finite, key=_value), max(finite, key=_value)}
        kept += sorted(ends, key=lambda point: point[0])
    return {"x": [x for x, _ in kept], "y": [y for _, y in kept]}


def _value(point: tuple[int, float | None]) -> float:
    assert point[1] is not None
    return point[1]


def number(value: Any) -> float | None:
    """A number of a record; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
