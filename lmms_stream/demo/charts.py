"""Bar charts whose numbers are the answers, drawn by matplotlib."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = ("ash", "elm", "fir", "oak")
HIGHEST = 9
_INCHES, _DOTS_PER_INCH = (2.24, 1.68), 100  # 224 x 168 pixels


def write_charts(folder: Path, *, num_charts: int, seed: int = 0) -> Path:
    """A JSON-lines file of chats and the PNG files that they name; every third chat compares two charts."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    values = rng.integers(1, HIGHEST + 1, (num_charts, len(NAMES)))
    draw_charts(folder, values)
    rows = [_question(number, values, rng) for number in range(num_charts)]
    path = folder / "charts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def draw_charts(folder: Path, values: NDArray[np.int64], *, dots_per_inch: int = _DOTS_PER_INCH) -> None:
    """A PNG file of each row of values, int64[num_charts, bars], by the names of chart_name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=dots_per_inch, layout="tight")
    axes = figure.subplots()
    bars = axes.bar(NAMES, [HIGHEST] * len(NAMES), color=["C0", "C1", "C2", "C3"])
    axes.set_ylim(0, HIGHEST + 1)
    axes.set_yticks(range(0, HIGHEST + 1, 3))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")  # it stays as it is: making and laying out one takes longer than to draw it
    for number, heights in enumerate(values):
        for bar, height in zip(bars, heights, strict=True):
            bar.set_height(int(height))
        canvas.print_png(str(folder / chart_name(number)))


def chart_name(number: int) -> str:
    return f"chart-{number:05}.png"


def _question(number: int, values: NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
    bar = int(rng.integers(len(NAMES)))
    if number % 3 == 2:
        text = f"<image><image>Which of the two charts has the higher {NAMES[bar]}?"
        pair = [int(values[number - 1, bar]), int(values[number, bar])]
        answer = "Both are equal." if pair[0] == pair[1] else "The first." if pair[0] > pair[1] else "The second."
        answer += f" It is {pair[0]} in the first and {pair[1]} in the second."
        images = [chart_name(number - 1), chart_name(number)]
    else:
        text = f"<image>How much is {NAMES[bar]}, and which bar is the highest?"
        answer = f"{int(values[number, bar])}. The highest is {NAMES[int(values[number].argmax())]}."
        images = [chart_name(number)]
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images}
