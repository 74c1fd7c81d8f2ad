"""Inspection in a terminal, or as one self-contained HTML page, with embedded styles and images and escaped text."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from ...cli.console import clip, console, print_table, visible
from ...cli.console_datasets import print_json, print_notes, print_view
from ...converters.stored.sample_view import MediaView, SampleView, SeenView, TokensView
from ...errors import ConfigError, StorageError
from .summary import (
    DrawnView,
    Histogram,
    Inspection,
    LengthsView,
    describe_lengths,
    describe_processor,
    summary,
)

MAX_IMAGE_BYTES = 1 << 20  # an image of more bytes is not put into the page
MAX_PAGE_IMAGE_BYTES = 1 << 24  # all images of the page together
MAX_TEXT = 50_000  # characters of one text
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp")
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --trained: #2ea04340; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { overflow-wrap: anywhere; line-height: 1.2; } h1 { font-size: 1.4rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1.5rem .15rem 0; vertical-align: top; }
th { font-weight: normal; color: var(--dim); white-space: nowrap; } td { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; font: 13px/1.5 ui-monospace, monospace; }
.message { border-left: 4px solid var(--line); padding: .2rem .8rem; margin: .6rem 0; }
.role, .note { color: var(--dim); font-size: .85rem; }
.system { border-color: #a371f7; } .user { border-color: #388bfd; }
.assistant { border-color: #2ea043; } .tool { border-color: #d29922; }
.tokens { border: 1px solid var(--line); border-radius: 6px; padding: .4rem .8rem; }
mark { background: var(--trained); color: inherit; } figure { margin: .5rem 0; }
img { max-width: 100%; max-height: 24rem; }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
"""


def write_page(inspection: Inspection, path: Path) -> None:
    """Write the page to a file; ConfigError without matplotlib if the page has lengths to draw."""
    write_text(render_page(inspection), path, option="--html")


def write_text(text: str, path: Path, *, option: str) -> None:
    """Write a text to a file; StorageError if the file cannot be written. option: names the file in a command."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}: name another file with {option}") from error


def render_page(inspection: Inspection) -> str:
    budget = [MAX_PAGE_IMAGE_BYTES]
    return whole_page(
        inspection.url,
        [
            table_lines(summary(inspection)),
            "<h2>Columns</h2>",
            table_lines(inspection.columns),
            *_lengths(inspection.lengths),
            *_drawn(inspection.drawn),
            *(f'<p class="note">{escaped(note)}</p>' for note in inspection.notes),
            *(line for sample in inspection.samples for line in sample_lines(sample, inspection.num_samples, budget)),
        ],
    )


def render_sample(sample: SampleView, *, num_samples: int, url: str) -> str:
    """Return an HTML page of one sample of a dataset at a URL."""
    return whole_page(url, sample_lines(sample, num_samples, [MAX_PAGE_IMAGE_BYTES]))


def render_note(title: str, note: str) -> str:
    """Return a page with the reason for a missing sample."""
    return whole_page(title, [f'<p class="note">{escaped(note)}</p>'])


def whole_page(title: str, body: Iterable[str]) -> str:
    """Return an HTML page with a title and lines of its body."""
    # Protects the reader even if some text were not escaped.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escaped(title)}</h1>",
        *body,
        "</body></html>\n",
    ]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Return a text for HTML, without control characters, and clipped."""
    return html.escape(visible(clip(text, MAX_TEXT)), quote=True)


def table_lines(rows: Mapping[str, str]) -> str:
    """Return a table of two columns in HTML."""
    return (
        "<table>" + "".join(f"<tr><th>{escaped(key)}<td>{escaped(value)}" for key, value in rows.items()) + "</table>"
    )


def _lengths(lengths: tuple[LengthsView, ...]) -> Iterable[str]:
    if lengths:
        yield "<h2>Lengths</h2>"
        for one in lengths:
            yield table_lines(describe_lengths(one))
            yield f"<h3>Measured by</h3>{table_lines(describe_processor(one.processor))}"
        yield f"<figure>{drawn_plots([_plot_of(one) for one in lengths])}</figure>"


def _drawn(drawn: DrawnView) -> Iterable[str]:
    if plots := plots_of(drawn):
        yield f"<h2>Of {drawn.num_samples:,} samples drawn evenly</h2>"
        yield f"<figure>{drawn_plots(plots)}</figure>"


class Plot(NamedTuple):
    """A histogram to draw. unit: of its values. is_log: whether the axis is logarithmic."""

    title: str
    histogram: Histogram
    unit: str
    ylabel: str = "samples"
    is_log: bool = True
    median: float | None = None


def _plot_of(lengths: LengthsView) -> Plot:
    name = str(lengths.processor.get("class", "")) or lengths.fingerprint
    title = f"lengths of the samples, measured by {name}"
    histogram = Histogram(edges=lengths.edges, counts=lengths.counts)
    return Plot(title, histogram, "tokens per sample", median=lengths.tokens.median)


def plots_of(drawn: DrawnView) -> list[Plot]:
    """Return histograms of drawn samples."""
    plots = []
    if (sides := drawn.image_sides) is not None:
        plots.append(Plot(f"sizes of {sum(sides.counts):,} images", sides, "longer side in pixels", "images"))
    if (shares := drawn.trained_shares) is not None:
        title = f"tokens that are trained on, of {sum(shares.counts):,} samples"
        plots.append(Plot(title, shares, "share of the sample's tokens", is_log=False))
    return plots


def drawn_plots(plots: Sequence[Plot]) -> str:
    """Draw histograms below each other; return an SVG element."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
    except ImportError as error:
        raise ConfigError("the page's figure needs matplotlib: pip install 'lmms-stream[demo]'") from error

    figure = Figure(figsize=(9, 2.6 * len(plots)), layout="constrained")
    for axes, plot in zip(figure.subplots(len(plots), squeeze=False)[:, 0], plots, strict=True):
        edges = plot.histogram.edges
        axes.stairs(plot.histogram.counts, edges, fill=True, color="#388bfd")
        axes.set(xlabel=plot.unit, ylabel=plot.ylabel)
        axes.set_title(plot.title, fontsize="small", parse_math=False)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        if plot.is_log:
            is_wide = edges[-1] > 10 * max(edges[0], 1)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if is_wide else MaxNLocator(nbins=8, integer=True))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        if plot.median is not None:
            axes.axvline(plot.median, color="black", linestyle=":", label=f"median {plot.median:,.0f}")
            axes.legend()
    file = io.StringIO()
    with rc_context({"svg.hashsalt": "lmms_stream"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawn = file.getvalue()
    return drawn[drawn.index("<svg") :]


def sample_lines(sample: SampleView, total: int, budget: list[int]) -> Iterable[str]:
    """Yield a sample in HTML. budget: bytes left for images of the page, lowered by its images."""
    yield f"<h2>Sample {sample.number:,} of {total:,}</h2>"
    made_of = f", made of {sample.source}" if sample.source else ""
    yield f'<p class="note">{escaped(sample.shard)}, {sample.num_bytes:,} bytes{escaped(made_of)}</p>'
    if sample.tools:
        yield '<div class="message"><div class="role">tools</div>'
        yield from (f"<pre>{escaped(tool)}</pre>" for tool in sample.tools)
        yield "</div>"
    for message in sample.messages:
        known = message.role if message.role in ("system", "user", "assistant", "tool") else "other"
        yield f'<div class="message {known}"><div class="role">{escaped(message.role)}</div>'
        for block in message.blocks:
            if block.media is None:
                yield f"<pre>{escaped(block.text)}</pre>"
            else:
                yield _media(sample.media[block.media], budget)
        yield "</div>"
    if sample.values:
        yield table_lines(sample.values)
    if not sample.messages:
        yield from (_media(part, budget) for part in sample.media)
    if sample.tokens is not None:
        yield "".join(_tokens(sample.tokens, sample.seen, budget))
    if sample.note:
        yield f'<p class="note">{escaped(sample.note)}</p>'


def _media(part: MediaView, budget: list[int]) -> str:
    """A picture where its header and size allow; what it is, in any case."""
    picture = ""
    label = part.label
    if part.mime in _IMAGES and part.width is not None:
        if part.num_bytes <= min(MAX_IMAGE_BYTES, budget[0]):
            budget[0] -= part.num_bytes
            picture = f'<img alt="" src="data:{part.mime};base64,{base64.b64encode(part.data).decode()}">'
        else:
            label += " (too large for this page: see it with --save-media)"
    return f'<figure>{picture}<figcaption class="note">{escaped(label)}</figcaption></figure>'


def _tokens(tokens: TokensView, seen: Sequence[SeenView], budget: list[int]) -> Iterable[str]:
    yield f'<p class="note">{tokens.num_tokens:,} tokens, <mark>{tokens.num_trained:,} of them trained on</mark></p>'
    yield '<div class="tokens"><pre>'
    shown: set[int] = set()
    for run in tokens.runs:
        if run.heading:
            yield f'</pre><div class="role">{escaped(run.heading)}</div><pre>'
        if run.seen is None:
            yield f"<mark>{escaped(run.text)}</mark>" if run.trained else escaped(run.text)
        elif run.seen not in shown:  # a video may have tokens of text between its frames
            shown.add(run.seen)
            yield _seen(seen[run.seen], budget)
    yield "</pre></div>"


def _seen(medium: SeenView, budget: list[int]) -> str:
    """Return the picture of a medium in the model's view, to stand before its tokens."""
    picture, size = "", len(medium.picture)
    label = medium.label
    if size <= min(MAX_IMAGE_BYTES, budget[0]):
        budget[0] -= size
        picture = f'<img alt="" src="data:image/png;base64,{base64.b64encode(medium.picture).decode()}">'
    else:
        label += " (too large for this page)"
    return f'<figure>{picture}<figcaption class="note">{escaped(label)}</figcaption></figure>'


# Tables, bars and samples in a terminal, or JSON.

BAR_CELLS = 40


def print_inspection(inspection: Inspection, saved: Sequence[Path], *, as_json: bool) -> None:
    """Print the dataset in tables, lengths as bars, and the chosen samples."""
    if as_json:
        record = dataclasses.asdict(inspection, dict_factory=_without_bytes)
        print_json(record | {"saved": [str(path) for path in saved]})
        return
    _print_rows(inspection.url, summary(inspection))
    _print_rows("columns", inspection.columns)
    for lengths in inspection.lengths:
        _print_rows("lengths", describe_lengths(lengths))
        _print_rows("measured by", describe_processor(lengths.processor))
        print_bars(_plot_of(lengths))
    for plot in plots_of(inspection.drawn):
        console.print(f"{plot.title}: {plot.unit}")
        print_bars(plot)
    print_notes(inspection.notes)
    for sample in inspection.samples:
        print_view(sample, total=inspection.num_samples)
    for path in saved:
        console.print(Text(f"saved {path}"), soft_wrap=True)


def _without_bytes(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if not isinstance(value, bytes)}


def _print_rows(title: str, rows: Mapping[str, str]) -> None:
    table = Table("", "", show_header=False)
    for name, value in rows.items():
        table.add_row(Text(visible(name)), Text(visible(value)))
    print_table(title, table)


def print_bars(plot: Plot) -> None:
    """Print a line for each bin of a histogram."""
    edges, counts = plot.histogram.edges, plot.histogram.counts
    most = max(counts)
    table = Table.grid(padding=(0, 1))
    for column in ("right", "left", "right"):
        table.add_column(justify=column)
    for first, stop, count in zip(edges, edges[1:], counts, strict=False):
        cells = -(-count * BAR_CELLS // most)  # a bar for any count but 0
        if isinstance(first, int):
            span = f"{first:,}" if stop - first == 1 else f"{first:,} to {stop - 1:,}"
        else:
            span = f"{first:g} to {stop:g}"
        table.add_row(span, Text("█" * cells, style="cyan"), f"{count:,}")
    console.print(table)
