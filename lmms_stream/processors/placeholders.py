"""Where media stand in a text: placeholders are matched to media, and replaced where a family writes more. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import DataError
from .byte_tokens import Span
from .conversation import Rendered
from .families.family import Layout


class Filled(NamedTuple):
    """A text with its media, in the order of their placeholders: layouts, and the index of each among the sample's."""

    text: str
    layouts: list[Layout]
    indices: list[int]
    edits: list[Edit]


class Edit(NamedTuple):
    """The characters [start, stop) of a text became those [new_start, new_stop) of another."""

    start: int
    stop: int
    new_start: int
    new_stop: int


@dataclass(frozen=True, slots=True)
class Placeholders:
    """tokens: kind of media -> what the template writes for one. repeated, surroundings: see Family."""

    tokens: Mapping[str, str]
    repeated: Collection[str]
    surroundings: tuple[str, str]

    def check(self, text: str, layouts: Sequence[Layout]) -> None:
        """DataError unless a text has a placeholder for each medium, and no other, nor a token that layouts write."""
        between = text
        for token in self.tokens.values():
            between = between.replace(token, "")
        for token in self.repeated:
            if token in between:
                raise DataError(
                    f"its text has {token}, which stands for a part of a medium: take the token out of the texts of "
                    "its messages"
                )
        for kind, token in self.tokens.items():
            num_written = text.count(token)
            num_media = sum([layout.kind == kind for layout in layouts])
            if num_written > num_media:
                raise DataError(
                    f"its text has {token} {num_written} times, and it has {num_media} media of type {kind}: take the "
                    "token out of the texts of its messages, since the chat template writes it where media stand"
                )
            if num_written < num_media:
                raise DataError(
                    f"the chat template writes {token} {num_written} times, and it has {num_media} media of type "
                    f"{kind}: take a template that writes it for each"
                )

    def fill(self, text: str, layouts: Sequence[Layout]) -> Filled:
        """layouts: of the sample's media in their order, checked."""
        kinds = {token: kind for kind, token in self.tokens.items()}
        following = {
            kind: iter([index for index, layout in enumerate(layouts) if layout.kind == kind]) for kind in self.tokens
        }
        pieces: list[str] = []
        indices: list[int] = []
        edits: list[Edit] = []
        begin = length = 0
        for found in re.finditer("|".join(map(re.escape, self.tokens.values())), text):
            index = next(following[kinds[found[0]]])
            indices.append(index)
            new = layouts[index].text
            if new:
                start, stop = self._with_surroundings(text, *found.span())
                pieces += text[begin:start], new
                length += start - begin
                edits.append(Edit(start, stop, length, length + len(new)))
                length += len(new)
                begin = stop
        return Filled("".join([*pieces, text[begin:]]), [layouts[index] for index in indices], indices, edits)

    def _with_surroundings(self, text: str, start: int, stop: int) -> Span:
        before, after = self.surroundings
        if text.endswith(before, 0, start) and text.startswith(after, stop):
            return start - len(before), stop + len(after)
        return start, stop


def moved(rendered: Rendered, filled: Filled) -> Rendered:
    """Spans of a text as spans of the text that its edits make; what they wrote is not learnt."""
    (_, spans), left_out = rendered.marked, rendered.left_out
    if not filled.edits:
        return Rendered((filled.text, spans), left_out)
    edits = filled.edits
    new_spans, new_left_out = (_not_empty([_moved_span(span, edits) for span in each]) for each in (spans, left_out))
    written = [
        (edit.new_start, edit.new_stop)
        for edit in edits
        if any(start < edit.stop and edit.start < stop for start, stop in spans)
    ]
    return Rendered((filled.text, new_spans), [*new_left_out, *written])


def _not_empty(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span[0] < span[1]]


def _moved_span(span: Span, edits: Sequence[Edit]) -> Span:
    start, stop = (_moved_offset(offset, edits) for offset in span)
    return start, stop


def _moved_offset(offset: int, edits: Sequence[Edit]) -> int:
    """An offset inside of an edit becomes its end."""
    number = bisect_right(edits, offset, key=lambda edit: edit.start + 1)  # edits that begin before it
    if not number:
        return offset
    edit = edits[number - 1]
    return max(edit.new_stop, offset - edit.stop + edit.new_stop)
