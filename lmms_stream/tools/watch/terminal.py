"""Runs as text for a terminal. view -> what rich prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...cli.console import visible

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 32  # of a curve
_ALERTS, _CHECKPOINTS, _SAMPLES = 3, 3, 12


def terminal_view(views: Sequence[Mapping[str, Any]]) -> Group:
    """All runs, one below another; text of the runs is shown as it is, control characters as escapes.

    What matters most is first, as a terminal may be too low for all of it.
    """
    return Group(*map(_run, views))


def _run(view: Mapping[str, Any]) -> Panel:
    done = "" if view["done"] is None else f", {view['done']:.0%} done"
    parts: list[RenderableType] = [_line("", f"{view['state']}{done}", style="bold")]
    for alert in view["alerts"][:_ALERTS]:
        parts.append(_line("alert  ", alert["message"], style="yellow"))
    if view["num_alerts"] > _ALERTS:
        parts.append(_line("", f"{view['num_alerts'] - _ALERTS} earlier alerts", style="yellow"))
    if view["figures"]:
        parts += [_figures(view["figures"]), _curves(view["panels"])]
    if view["checkpoints"]:
        parts.append(_line("checkpoints  ", _some(view["checkpoints"], _CHECKPOINTS)))
    if view["samples"]:
        ids = _some(view["samples"]["ids"], _SAMPLES)
        parts.append(_line(f"samples of step {view['samples']['step']:,}  ", ids))
    if view["num_damaged_lines"]:
        parts.append(_line("", f"{view['num_damaged_lines']} lines of the log are no records", style="red"))
    return Panel(Group(*parts), title=Text(visible(view["name"])), title_align="left")


def _line(label: str, text: str, *, style: str = "") -> Text:
    return Text.assemble((label, "dim"), (visible(text), style))


def _figures(figures: Sequence[tuple[str, str]]) -> Table:
    """Labels and values, two pairs a row."""
    table = Table.grid(padding=(0, 2))
    half = -(-len(figures) // 2)
    for number in range(half):
        pairs = figures[number::half]
        table.add_row(*(cell for label, text in pairs for cell in (Text(label, "dim"), Text(text))))
    return table


def _curves(panels: Sequence[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for panel in panels:
        first = panel["series"][0]
        values = [value for value in first["y"] if value is not None]
        ends = f"{_shown(min(values), panel['unit'])} to {_shown(max(values), panel['unit'])}"
        table.add_row(Text(panel["title"], "dim"), Text(sparkline(first["y"]), "cyan", no_wrap=True), Text(ends))
    return table


def _shown(value: float, unit: str) -> str:
    """
    >>> _shown(20512.25, "rate"), _shown(0.0521, "share"), _shown(1.40712, "")
    ('20,512/s', '5.2%', '1.407')
    """
    if unit == "share":
        return f"{value:.1%}"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return text + {"rate": "/s", "MiB": " MiB"}.get(unit, "")


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """A curve of some characters, each the largest of its part; a gap is a space.

    >>> sparkline([0, 1, None, 7])
    '▁▂ █'
    """
    size = max(1, -(-len(values) // width))
    parts = [[each for each in values[at : at + size] if each is not None] for at in range(0, len(values), size)]
    heights = [max(part) if part else None for part in parts]
    finite = [height for height in heights if height is not None]
    least, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(" " if each is None else _BLOCKS[round((each - least) / span * top)] for each in heights)


def _some(names: Sequence[Any], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
