"""A stored sample -> a view for people: messages, media, the text that is trained on. Nothing is executed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from ...mds.index import ShardInfo
from ...processors.base import IGNORED_LABEL, Processor, SeeMedia, SeenMedium
from ...processors.media.facts import SOUND_OF_VIDEO, MediaPart, media_part
from ...processors.media.formats import shown_mime
from ...processors.media.types import interval_of
from ...processors.stored_chat import read_chat, read_preference
from ...processors.text import DocumentsProcessor, TokensProcessor
from ...types import Processed, Role, Sample

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...processors.tokenizers import FastTokenizer


_MAX_VALUES = 32  # maximum values shown of an array


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaView:
    """A medium of a sample.

    kind, mime: from its first bytes or the sample. width, height: in pixels, from the facts or the image's header.
    facts: stored facts by name, and the seconds of a video that are read.
    """

    kind: str
    mime: str
    num_bytes: int
    width: int | None
    height: int | None
    facts: Mapping[str, int | float]
    extension: str
    data: bytes

    @staticmethod
    def of(part: MediaPart) -> MediaView:
        facts = {**(part.facts._asdict() if part.facts else {}), **(part.interval.said if part.interval else {})}
        if part.sound is not None:
            facts |= zip(SOUND_OF_VIDEO, part.sound, strict=True)
        width, height = (facts["width"], facts["height"]) if "width" in facts else part.image_size or (None, None)
        return MediaView(
            kind=part.kind,
            mime=part.real_mime,
            num_bytes=len(part.data),
            width=width,
            height=height,
            facts=facts,
            extension=part.extension,
            data=part.data,
        )

    @property
    def label(self) -> str:
        size = "" if self.width is None else f", {self.width} x {self.height}"
        if "fps" in self.facts:
            size += f", {self.facts['frames']:,} frames at {self.facts['fps']:.6g} a second"
        if interval := interval_of(self.facts):
            size += f", of which {interval} are read"
        if "sound_rate" in self.facts:
            size += f", with {self.facts['sound_samples']:,} samples of sound at {self.facts['sound_rate']:,} Hz"
        if "rate" in self.facts:
            size += f", {self.facts['samples']:,} samples at {self.facts['rate']:,} Hz"
        kind = "" if self.mime.startswith(f"{self.kind}/") else f"{self.kind} "
        return f"{kind}{self.mime or 'of an unknown type'}, {self.num_bytes:,} bytes{size}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MessagePart:
    """Text of a message, or the index of a medium in the sample's media at this position."""

    text: str = ""
    media: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageView:
    role: str
    blocks: tuple[MessagePart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRun:
    """Text of consecutive tokens, all trained on, or all untrained, or all of one medium.

    seen: index of the medium in SampleView.seen. heading: heading of a part that begins here, else "".
    """

    text: str
    trained: bool
    seen: int | None = None
    heading: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensView:
    num_tokens: int
    num_trained: int
    runs: tuple[TokenRun, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """A sample for people.

    tools: tools for the assistant, as text. values: columns other than messages, media and tokens, as text. seen: media
    as prepared by a processor for the model. note: reason for missing tokens, else "". source: the sample's original
    row, "" if unknown.
    """

    number: int
    shard: str
    num_bytes: int
    tools: tuple[str, ...]
    messages: tuple[MessageView, ...]
    media: tuple[MediaView, ...]
    values: Mapping[str, str]
    tokens: TokensView | None
    seen: tuple[SeenView, ...]
    note: str
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Viewer:
    """Views of samples.

    processor: makes tokens of samples. tokenizer: decodes tokens to text; None shows token ids.
    """

    schema: str | None
    processor: Processor | None
    tokenizer: FastTokenizer | None

    @staticmethod
    def load(schema: str | None, tokenizer: str | None, processor: Processor | None = None) -> Viewer:
        """Return a viewer for samples of a schema; ConfigError for a tokenizer that cannot be loaded or is not needed.

        tokenizer: tokenizer of stored tokens.
        """
        if schema is None and tokenizer is not None:
            raise ConfigError("the dataset holds no messages, tokens or texts: leave --tokenizer out")
        if processor is not None:
            return Viewer(schema=schema, processor=processor, tokenizer=getattr(processor, "tokenizer", None))
        processor = TokensProcessor() if schema == TokensProcessor.schema else None
        if tokenizer is None:
            return Viewer(schema=schema, processor=processor, tokenizer=None)
        from ...processors.tokenizers import load_tokenizer

        return Viewer(schema=schema, processor=processor, tokenizer=load_tokenizer(tokenizer))

    def view(self, sample: Sample, *, number: int, shard: ShardInfo, num_bytes: int) -> SampleView:
        """Return the view of a sample; DataError if it does not fit its schema."""
        tools: tuple[str, ...] = ()
        messages: tuple[MessageView, ...] = ()
        media: list[MediaPart] = []
        try:
            if self.schema == "messages":
                chat = read_chat(sample["messages"])
                tools = tuple(_json(tool) for tool in chat.tools or ())
                messages = tuple(_view_message(message, sample["media"], media) for message in chat.messages)
            elif self.schema == "preference":
                tools, messages = _view_preference(sample, media)
        except DataError as error:
            raise DataError(f"sample {number}: {error}") from error
        named = {
            "messages": ("messages", "media"),
            "preference": ("messages", "media"),
            "tokens": ("input_ids", "loss_spans", "document_starts"),
        }.get(str(self.schema), ())
        values = {name: _describe(value, media) for name, value in sample.items() if name not in named}
        tokens, note = None, ""
        seen: tuple[SeenView, ...] = ()
        if self.processor is not None:
            try:
                seen = seen_by(self.processor, sample)
                tokens = self._view_tokens(self.processed(sample), seen)
            except Exception as error:  # noqa: BLE001 - a chat template may refuse a sample with any error
                note = f"it does not become tokens: {error if isinstance(error, DataError) else repr(error)}"
        return SampleView(
            number=number,
            shard=shard.name,
            num_bytes=num_bytes,
            tools=tools,
            messages=messages,
            media=tuple(MediaView.of(part) for part in media),
            values=values,
            tokens=tokens,
            seen=seen if tokens is not None else (),
            note=note,
        )

    def processed(self, sample: Sample) -> Processed:
        """Return the tokens and labels of a sample. Raises the errors of the processor."""
        if isinstance(self.processor, TokensProcessor) and "document_starts" in sample:
            return DocumentsProcessor().process(sample)
        if self.processor is None:
            raise ConfigError("samples become tokens by a processor: pass one, or a tokenizer")
        return self.processor.process(sample)

    def _view_tokens(self, processed: Processed, seen: Sequence[SeenView]) -> TokensView:
        input_ids = np.asarray(processed["input_ids"])
        trained = np.asarray(processed["labels"]) != IGNORED_LABEL
        media = np.full(len(input_ids), -1)
        for number, medium in enumerate(seen):
            for first, stop in medium.spans:
                media[first:stop] = number
        changes = (trained[1:] != trained[:-1]) | (media[1:] != media[:-1])
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(input_ids)]
        runs = [
            TokenRun(
                text=self._text(input_ids[start:stop].tolist()),
                trained=bool(trained[start]),
                seen=int(media[start]) if media[start] >= 0 else None,
                heading=heading if start == first else "",
            )
            for heading, first, last in token_parts(processed)
            for start, stop in pairwise([first, *(edge for edge in edges if first < edge < last), last])
            if start < stop
        ]
        return TokensView(num_tokens=len(input_ids), num_trained=int(trained.sum()), runs=tuple(runs))

    def _text(self, input_ids: list[int]) -> str:
        if self.tokenizer is None:
            return "".join(f"{token} " for token in input_ids)
        return self.tokenizer.decode(input_ids)


def _view_preference(sample: Sample, media: list[MediaPart]) -> tuple[tuple[str, ...], tuple[MessageView, ...]]:
    """Return tools and messages of a preference; each message's role begins with its part's name."""
    found = read_preference(sample["messages"])
    verdict = {None: "", True: " (good)", False: " (bad)"}[found.label]
    parts = {"prompt": found.prompt} | {f"{name}{verdict}": answer for name, answer in found.answers.items()}
    views = []
    for heading, part in parts.items():
        if isinstance(part, str):
            views.append(MessageView(role=heading, blocks=(MessagePart(text=part),)))
            continue
        shown = [_view_message(message, sample["media"], media) for message in part]
        views += [replace(view, role=f"{heading}: {view.role}") for view in shown]
    return tuple(_json(tool) for tool in found.tools or ()), tuple(views)


def _view_message(message: Mapping[str, Any], data: bytes, media: list[MediaPart]) -> MessageView:
    """Return the view of a message; append its media to `media`."""
    content = message.get("content")
    blocks = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []:
        if part["type"] == "text":
            blocks.append(MessagePart(text=part["text"]))
        else:
            blocks.append(MessagePart(media=len(media)))
            media.append(media_part(part, data))
    calls: Any = message.get("tool_calls")
    told = list(_view_calls(calls)) if _are_calls(calls) else []
    shown = ("role", "content", "tool_calls") if told else ("role", "content")
    others = {key: value for key, value in message.items() if key not in shown}
    blocks += [MessagePart(text=text) for text in (*told, *([_json(others)] if others else []))]
    return MessageView(role=message["role"], blocks=tuple(blocks))


def _are_calls(calls: Any) -> bool:
    """Whether a value is a list of tool calls in OpenAI's form."""
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) and "name" in call["function"]
        for call in calls
    )


def _view_calls(calls: list[dict[str, Any]]) -> Iterator[str]:
    """Yield each call: the name of the function, and the arguments in JSON, even if stored in JSON text."""
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        called = f"calls {function['name']}" + (f", id {call['id']}" if "id" in call else "")
        yield f"{called}: {arguments if isinstance(arguments, str) else _json(arguments)}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


def _describe(value: Any, media: list[MediaPart]) -> str:
    """Return a value of any column as text; append images and other media to `media`."""
    from PIL import Image

    if isinstance(value, bytes):
        mime = shown_mime(value, "")
        if mime is None:
            return f"{len(value):,} bytes"
        media.append(MediaPart(kind=mime.partition("/")[0], mime=mime, data=value))
        return f"{len(value):,} bytes, see media {len(media) - 1}"
    if isinstance(value, Image.Image):
        shown = f"an image of {value.width} x {value.height}"
        try:
            media.append(MediaPart(kind="image", mime="", data=_image_file(value)))
        except OSError:
            return f"{shown} in the mode {value.mode}, which is not shown"
        return f"{shown}, see media {len(media) - 1}"
    if isinstance(value, np.ndarray):
        shown = " ".join(str(item) for item in value.flat[:_MAX_VALUES])
        return f"{value.dtype}{list(value.shape)}: {shown}{' …' if value.size > _MAX_VALUES else ''}"
    if isinstance(value, list) and value and isinstance(value[0], Image.Image):
        return "; ".join(_describe(item, media) for item in value)
    if isinstance(value, (str, np.generic, Decimal)):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _image_file(image: Image) -> bytes:
    """Return the stored file of an image, or the pixels in PNG; OSError for a mode without a PNG form."""
    stored = getattr(image, "fp", None)  # of an image with undecoded pixels
    if isinstance(stored, io.BytesIO):
        return stored.getvalue()
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return encoded.getvalue()


# Media as seen by a model, for people. A processor's pixels -> pictures, with their tokens.

_MAX_FRAMES = 32  # maximum frames shown of a video
_GAP = 2  # pixels between frames


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenView:
    """A medium in a processor's view.

    spans: its tokens, [first, stop) each. label: kind, size and number of tokens. picture: a PNG; of a video its
    frames, row by row; of a sound its waveform.
    """

    kind: str
    spans: tuple[tuple[int, int], ...]
    label: str
    picture: bytes

    @staticmethod
    def of(seen: SeenMedium) -> SeenView:
        num_frames, height, width = seen.pixels.shape[:3]
        num_tokens = sum(stop - first for first, stop in seen.spans)
        label = f"{seen.kind} of {width} x {height}, {num_tokens:,} tokens"
        if len(seen.frames):
            numbers = ", ".join(map(str, seen.frames[:_MAX_FRAMES])) + (", …" if num_frames > _MAX_FRAMES else "")
            label = f"{seen.kind} of {num_frames} frames of {width} x {height}, {num_tokens:,} tokens: frames {numbers}"
            label += f"; sound: {seen.heard}" if seen.heard else ""
        elif seen.heard:
            label = f"{seen.kind} of {seen.heard}, {num_tokens:,} tokens"
        return SeenView(kind=seen.kind, spans=tuple(seen.spans), label=label, picture=_png(seen.pixels[:_MAX_FRAMES]))


def seen_by(processor: Processor | None, sample: Sample) -> tuple[SeenView, ...]:
    """Return a media processor's views of a sample's media; () for other processors. Raises the processor's errors."""
    see: SeeMedia | None = getattr(processor, "see_media", None)
    return () if see is None else tuple(SeenView.of(each) for each in see(sample))


def _png(frames: NDArray[np.uint8]) -> bytes:
    """Return frames uint8[N, H, W, 3] in one roughly square PNG."""
    from PIL import Image

    num_frames, height, width, _ = frames.shape
    columns = min(num_frames, max(1, round(math.sqrt(num_frames * height / width))))
    rows = -(-num_frames // columns)
    sheet = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 255, np.uint8)
    for number, frame in enumerate(frames):
        top, left = number // columns * (height + _GAP), number % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = frame
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG")
    return buffer.getvalue()


# Tokens of sequences for people: documents, or the prompt of answers once and then each answer. Pure.

_NAMES = {
    2: {Role.CHOSEN: "chosen", Role.REJECTED: "rejected"},
    1: {Role.CHOSEN: "answer (good)", Role.REJECTED: "answer (bad)"},
}  # names of roles, by number of answers


def token_parts(processed: Processed) -> list[tuple[str, int, int]]:
    """Return the parts of a sample's tokens: a heading, and its tokens [first, stop).

    Answers: the prompt of the first answer, then each answer from its first trained token. Documents: each document.
    Other samples: all tokens, without a heading.
    """
    labels = np.asarray(processed["labels"])
    if "sequences" not in processed:
        return [("", 0, len(labels))]
    sequences = np.asarray(processed["sequences"]).tolist()
    parts, first = [], 0
    if sequences[0][1] == Role.DOCUMENT:
        starts = list(accumulate((length for length, _ in sequences), initial=0))
        return [
            (f"document of {stop - start:,} tokens in this sample", start, stop) for start, stop in pairwise(starts)
        ]
    for number, (length, role) in enumerate(sequences):
        learnt = np.flatnonzero(labels[first : first + length] != IGNORED_LABEL)
        answer = first + (int(learnt[0]) if len(learnt) else 0)
        if number == 0:
            parts.append(("prompt", first, answer))
        name = _NAMES[min(len(sequences), 2)][Role(role)]
        parts.append((f"{name}, a sequence of {length:,} tokens", answer, first + length))
        first += length
    return parts
