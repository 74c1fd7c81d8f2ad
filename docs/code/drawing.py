"""Boxes, arrows and words -> the text of an SVG file, on a light ground that is read on dark pages, too."""

from __future__ import annotations

from html import escape

INK, FAINT = "#1f2933", "#9aa5b1"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#72b7b2", "#eeca3b", "#9d755d", "#bab0ac", "#d67195",
           "#86bcb6", "#499894")  # fmt: skip


class Drawing:
    """Sizes and positions in pixels, from the upper left corner."""

    def __init__(self, width: int, height: int, *, title: str) -> None:
        self._size = width, height
        self._title = title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = "#ffffff", text: str = "") -> None:
        """A rectangle, with words in its middle; a line end in them begins a new line."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="#52606d"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            self.words(x + width / 2, y + height / 2 + 5 + 16 * (number - (len(lines) - 1) / 2), line, middle=True)

    def cell(self, x: float, y: float, width: float, height: float, *, fill: str) -> None:
        """A rectangle without a border."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>')

    def words(
        self, x: float, y: float, text: str, *, middle: bool = False, faint: bool = False, size: int = 13
    ) -> None:
        anchor = ' text-anchor="middle"' if middle else ""
        colour = "#616e7c" if faint else INK
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{anchor}>{escape(text)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, both: bool = False) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="#52606d" stroke-width="1.5" '
            f'marker-end="url(#head)"{start}/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK}" stroke-width="1.5"/>'
        )

    @property
    def svg(self) -> str:
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{escape(self._title)}</title>'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="#52606d"/></marker></defs>'
            f'<rect width="{width}" height="{height}" rx="8" fill="#f5f7fa"/>'
        )
        return "\n".join([head, *self._parts, "</svg>", ""])
