"""Records of a run -> curves, with as many points as a page can draw. Values in, values out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

MAX_POINTS = 600  # of a curve
Record = Mapping[str, Any]
Unit = Literal["", "share", "rate", "MiB"]


class Panel(NamedTuple):
    """Curves that share an axis. value: of a record, by name, None where it has none."""

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
    """The panels that have values, as JSON values; the loss, by source and objective, is the first."""
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
    """Steps x and values y of a curve of at most `most` points: of each part the least and the largest stay.

    So a spike of one step is seen in a run of a million.
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
