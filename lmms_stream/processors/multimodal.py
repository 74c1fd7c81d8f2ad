"""Conversations with media -> tokens, positions and the tensors of a model's tower."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import plain_path
from ..errors import ConfigError, DataError, did_you_mean
from ..types import Processed, Sample
from .agreement import compared, or_installed
from .base import (
    IGNORED_LABEL,
    FactsMissingError,
    Measured,
    MediaWithoutTokensError,
    Memory,
    SeenMedium,
    TokensWithoutMediaError,
    learnt_of,
    measured_tokens,
    or_error,
    through,
)
from .conversation import Chat, Conversations, Learn, Parts, Rendered
from .families.family import Family, FamilyMaker, Layout
from .families.files import ProcessorFiles, read_files
from .families.registry import family_of
from .families.settings import MediaSettings
from .media.facts import facts_of, media_part, sound_of_video, stored_facts, stored_sound
from .media.types import interval_of, new_memory
from .stored_chat import read_chat
from .tokenizers import FastTokenizer, load_tokenizer

if TYPE_CHECKING:
    from .media.facts import AudioFacts, Facts


class MultimodalProcessor:
    """Processor that renders `messages` with the chat template of a transformers processor, and reads their media from
    `media`.

    Trained on are the same spans as in ChatProcessor, without the tokens of media. Media are measured from their stored
    facts; if these are missing, from their bytes. Images are turned by EXIF.

    Use `from_pretrained`. ConfigError for a tokenizer without chat template or without the family's tokens.
    """

    columns = ("messages", "media")
    measured_columns = ("messages",)
    schema = "messages"

    def __init__(
        self, tokenizer: FastTokenizer, family: Family, *, learn: Learn = "all", learn_stop: bool | None = False
    ):
        self.tokenizer = tokenizer
        self.family = family
        self._conversations = Conversations(tokenizer, learn=learn, learn_stop=learn_stop)
        self._conversations.warn_of_ends()
        repeated = [*(getattr(family, "repeated_tokens", None) or family.placeholders.values())]
        self._placeholders = Placeholders(family.placeholders, repeated, family.surroundings)
        self._placeholder_ids = np.array([_token_id(tokenizer, token) for token in repeated])
        self._never_learnt = np.array([_token_id(tokenizer, token) for token in family.media_tokens])

    @staticmethod
    def from_pretrained(
        path: str,
        *,
        learn: Learn = "all",
        learn_stop: bool | None = False,
        family: FamilyMaker | None = None,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> MultimodalProcessor:
        """Return the processor at a local path or hub id. settings: of MediaSettings. family: default, the path's own.

        learn_stop: see ChatProcessor; None if ends of answers do not matter. trust_remote_code: see load_tokenizer.
        """
        known = [field.name for field in fields(MediaSettings)]
        for name in settings.keys() - {*known}:
            raise ConfigError(f"a processor of media has no setting {name!r}: {did_you_mean(name, known)}")
        chosen = MediaSettings(**settings)
        path = str(plain_path("path", path))
        files, tokenizer = _read_folder(path, trust_remote_code)
        ids = partial(_token_id, tokenizer)
        maker = family or family_of(files)
        made = maker.of(files, chosen, ids)
        _check_sound(chosen, made, path)
        if chosen.frame_max_pixels is not None and not hasattr(made, "frame_max_pixels"):
            raise ConfigError(
                f"processor.frame_max_pixels is for Qwen3-VL's processor, and {path} holds another processor, whose "
                "video_max_pixels limits a frame: set video_max_pixels"
            )
        for name in ("slow_every", "frame_times"):
            if getattr(chosen, name) and not hasattr(made, "words_behind"):
                raise ConfigError(
                    f"processor.{name} is for videos of LLaVA-OneVision, and {path} holds another processor: leave it "
                    "out"
                )
        if family is None:
            made = or_installed(made, lambda: maker.of(files, MediaSettings(), ids), tokenizer, files)
        return MultimodalProcessor(tokenizer, made, learn=learn, learn_stop=learn_stop)

    @property
    def learn(self) -> Learn:
        return self._conversations.learn

    @property
    def description(self) -> Mapping[str, Any]:
        return {
            "class": "MultimodalProcessor",
            "version": 1,
            **self._conversations.description,
            "media": dict(self.family.description),
        }

    def measure(self, sample: Sample) -> int:
        return measured_tokens(self.measure_media, sample)

    def measure_media(self, samples: Sequence[Sample]) -> list[Measured | DataError]:
        """See MeasureMedia."""
        return through([or_error(self._filled, sample) for sample in samples], self._measured)

    def not_shown(self, samples: Sequence[Sample]) -> list[int | DataError]:
        """See NotShownOf."""
        return [or_error(lambda sample: self._conversations.not_shown(self._read(sample)[0]), s) for s in samples]

    def first_changed(self, samples: Sequence[Sample]) -> list[int | DataError | None]:
        """See FirstChanged."""
        return [or_error(lambda sample: self._conversations.first_changed(self._read(sample)[0]), s) for s in samples]

    def prompt_ids(self, sample: Sample) -> NDArray[np.int64]:
        """Tokens of a sample's messages and the generation prompt: int64[T]."""
        _, filled, _ = self._filled(sample, prompt=True)
        (ids,) = self.tokenizer.ids([filled.text], add_special_tokens=False)
        return np.repeat(ids.astype(np.int64), self._repeats(ids, filled))

    def is_learnable(self, input_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of tokens that do not stand for media."""
        return ~np.isin(input_ids, self._never_learnt)

    def _filled(self, sample: Sample, *, prompt: bool = False) -> tuple[Rendered, Filled, list[dict[str, Any]]]:
        """Return the text of a sample, or of a prompt, the text with its media, and their parts in their order."""
        chat, parts = self._read(sample)
        layouts = self._layouts(parts, sample)
        chats = self._conversations
        rendered = Rendered((chats.text(chat, prompt=True), []), []) if prompt else chats.rendered(chat)
        self._placeholders.check(rendered.marked[0], layouts)
        return rendered, self._placeholders.fill(rendered.marked[0], layouts), parts

    def _measured(self, made: Sequence[tuple[Rendered, Filled, Parts]]) -> list[Measured]:
        lengths = self.tokenizer.num_tokens([filled.text for _, filled, _ in made], add_special_tokens=False)
        return [_measured(filled.layouts, length) for (_, filled, _), length in zip(made, lengths, strict=True)]

    def process(self, sample: Sample) -> Processed:
        return self.process_into(sample, new_memory)

    def process_into(self, sample: Sample, memory: Memory) -> Processed:
        """See ProcessInto."""
        ids, learnt, filled, media = self._tokenized(sample)
        repeats = self._repeats(ids, filled)
        input_ids = np.repeat(ids.astype(np.int64), repeats)
        processed: dict[str, Any] = {
            "input_ids": input_ids,
            "labels": np.where(np.repeat(learnt, repeats), input_ids, IGNORED_LABEL),
        }
        if self.family.num_axes:
            processed["position_ids"] = self.family.positions(input_ids, filled.layouts)
        if getattr(self.family, "token_inputs", ()):
            processed["token_inputs"] = self.family.token_values(input_ids, filled.layouts)
        processed["media"] = self.family.tensors(filled.layouts, media, memory) if media else {}
        return processed

    def see_media(self, sample: Sample) -> list[SeenMedium]:
        """See SeeMedia."""
        ids, _, filled, media = self._tokenized(sample)
        stops = self._repeats(ids, filled).cumsum()
        ends = iter(stops[np.isin(ids, self._placeholder_ids)].tolist())
        seen = []
        for layout, data in zip(filled.layouts, media, strict=True):
            spans = [((stop := next(ends)) - count, stop) for count in layout.counts]
            pixels, heard = self.family.pixels(layout, data), getattr(self.family, "heard", None)
            words = "" if heard is None else heard(layout)
            seen.append(SeenMedium(layout.kind, spans, pixels, self.family.frames(layout), words))
        return seen

    def _tokenized(self, sample: Sample) -> _Tokenized:
        rendered, filled, parts = self._filled(sample)
        ((ids, spans),) = self._conversations.tokenized([moved(rendered, filled)])
        learnt = learnt_of(spans, len(ids)) & ~np.isin(ids, self._never_learnt)
        media = [media_part(parts[index], sample["media"]).data for index in filled.indices]
        return _Tokenized(ids, learnt, filled, media)

    def _read(self, sample: Sample) -> tuple[Chat, list[dict[str, Any]]]:
        """Read a sample's conversation, in which templates see only the kinds of media; and its media parts in their
        order.
        """
        media: list[dict[str, Any]] = []
        words_behind = getattr(self.family, "words_behind", None)

        def shown(parts: Parts) -> list[dict[str, Any]]:
            made: list[dict[str, Any]] = []
            for part in parts:
                made.append(part if part["type"] == "text" else {"type": part["type"]})
                if part["type"] != "text":
                    media.append(part)
                    if words_behind is not None and (words := words_behind(self._layout(part, sample))):
                        made.append({"type": "text", "text": words})
            return made

        return Chat.of(*read_chat(sample["messages"]), shown), media

    def _layouts(self, parts: Sequence[dict[str, Any]], sample: Sample) -> list[Layout]:
        layouts = [self._layout(part, sample) for part in parts]
        in_sample = getattr(self.family, "in_sample", None)
        return layouts if in_sample is None else list(in_sample(layouts))

    def _layout(self, part: dict[str, Any], sample: Sample) -> Layout:
        kind = part["type"]
        if kind not in self.family.placeholders:
            raise DataError(
                f"a message holds media of type {kind}, and {self.tokenizer.name} reads "
                f"{' and '.join(self.family.placeholders)}: take a processor of {kind}, or remove it"
            )
        facts = _facts(part, sample)
        interval = interval_of(part) if kind == "video" else None
        if kind == "video" and getattr(self.family, "with_sound", False):
            return self.family.video_with_sound(facts, interval, _sound_of_video(part, sample))  # type: ignore[attr-defined, no-any-return]
        return self.family.layout(kind, facts) if interval is None else self.family.layout(kind, facts, interval)

    def _repeats(self, ids: NDArray[np.int32], filled: Filled) -> NDArray[np.int64]:
        """Number of repeats of each token of a text in the sample: for a placeholder, the tokens of its medium."""
        repeats = np.ones(len(ids), np.int64)
        at = np.flatnonzero(np.isin(ids, self._placeholder_ids))
        repeats[at] = [count for layout in filled.layouts for count in layout.counts]
        return repeats


def write_differences(path: str, to: str, trusts: bool) -> None:
    """Compare the family of a path with the installed processor, and write the result into a file."""
    files, tokenizer = _read_folder(path, trusts)
    family = family_of(files).of(files, MediaSettings(), partial(_token_id, tokenizer))
    Path(to).write_text(json.dumps(compared(family, tokenizer, files)._asdict()), encoding="utf-8")


def _read_folder(path: str, trust_remote_code: bool) -> tuple[ProcessorFiles, FastTokenizer]:
    files = replace(read_files(path), trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return files, replace(tokenizer, chat_templates=files.chat_templates) if files.chat_templates else tokenizer


def _check_sound(settings: MediaSettings, family: Family, path: str) -> None:
    """Raise ConfigError for settings of sound that the family cannot follow."""
    needed = {"audio_max_length": {"audio"}, "use_audio_in_video": {"audio", "video"}}
    for name, kinds in needed.items():
        if getattr(settings, name) and not kinds <= set(family.placeholders):
            raise ConfigError(
                f"processor.{name} is for processors of {' and '.join(sorted(kinds))}, and {path} reads "
                f"{' and '.join(family.placeholders)}: leave it out"
            )


class _Tokenized(NamedTuple):
    """Tokens of a sample, with each placeholder once, whether they are trained on, and its media in the order of
    placeholders.
    """

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    filled: Filled
    media: list[bytes]


def _facts(part: dict[str, Any], sample: Sample) -> Facts:
    facts = stored_facts(part)
    if facts is not None:
        return facts
    if "media" not in sample:
        raise FactsMissingError(
            f"a part of type {part['type']} is stored without its size, and measuring was given no media: give the "
            "column media, too, or convert the dataset again"
        )
    return facts_of(media_part(part, sample["media"]).data, part["type"])


def _sound_of_video(part: dict[str, Any], sample: Sample) -> AudioFacts | None:
    """Facts about the sound of a video; None for a video without sound."""
    if (stored := stored_sound(part)) is not None:
        return stored
    if "media" not in sample:
        raise FactsMissingError("the sound of a video is counted from its bytes: give the column media, too")
    return sound_of_video(media_part(part, sample["media"]).data)


def _measured(layouts: Sequence[Layout], num_text_tokens: int) -> Measured:
    if not layouts:
        return Measured(tokens=num_text_tokens)
    tokens_of = {"image": 0, "video": 0, "audio": 0}
    num_placeholders = patches = 0
    for layout in layouts:
        tokens_of[layout.kind] += sum(layout.counts)
        num_placeholders += len(layout.counts)
        patches += layout.patches
    return Measured(
        tokens=num_text_tokens - num_placeholders + sum(tokens_of.values()),
        patches=patches,
        image_tokens=tokens_of["image"],
        video_tokens=tokens_of["video"],
        audio_tokens=tokens_of["audio"],
        num_cut=sum(layout.is_cut for layout in layouts),
    )


def _token_id(tokenizer: FastTokenizer, token: str) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise ConfigError(
            f"tokenizer {tokenizer.name} does not have {token} as one token, the placeholder of media in a text: use "
            "the tokenizer of the processor's own model"
        )
    return found


# Places of media in a text: placeholders are matched to media, and replaced by a family's longer text. Pure.


class Filled(NamedTuple):
    """A text with its media, in the order of their placeholders: layouts, and their indices among the sample's
    media.
    """

    text: str
    layouts: list[Layout]
    indices: list[int]
    edits: list[Edit]


class Edit(NamedTuple):
    """Replacement of the characters [start, stop) of a text by [new_start, new_stop) of the new text."""

    start: int
    stop: int
    new_start: int
    new_stop: int


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Placeholders of a family. tokens: kind of media -> the template's text for a medium. repeated, surroundings: see
    Family.
    """

    tokens: Mapping[str, str]
    repeated: Collection[str]
    surroundings: tuple[str, str]

    def check(self, text: str, layouts: Sequence[Layout]) -> None:
        """Raise DataError unless a text has exactly a placeholder for each medium, and no token that layouts write."""
        between = text
        for token in self.tokens.values():
            between = between.replace(token, "")
        for token in self.repeated:
            if token in between:
                raise TokensWithoutMediaError(
                    f"its text has {token}, a token reserved for media: remove the token from the texts of its messages"
                )
        for kind, token in self.tokens.items():
            num_written = text.count(token)
            num_media = sum([layout.kind == kind for layout in layouts])
            if num_written > num_media:
                raise TokensWithoutMediaError(
                    f"its text has {token} {num_written} times, and it has {num_media} media of type {kind}: remove "
                    "the token from the texts of its messages, because the chat template writes it for each medium"
                )
            if num_written < num_media:
                raise MediaWithoutTokensError(
                    f"the chat template writes {token} {num_written} times for a sample with {num_media} media of type "
                    f"{kind}: use a template that writes it once for each"
                )

    def fill(self, text: str, layouts: Sequence[Layout]) -> Filled:
        """Match placeholders to media and replace their texts. layouts: of the sample's media in their order,
        checked.
        """
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
                (start, stop), (before, after) = found.span(), self.surroundings
                if text.endswith(before, 0, start) and text.startswith(after, stop):
                    start, stop = start - len(before), stop + len(after)
                pieces += text[begin:start], new
                length += start - begin
                edits.append(Edit(start, stop, length, length + len(new)))
                length += len(new)
                begin = stop
        return Filled("".join([*pieces, text[begin:]]), [layouts[index] for index in indices], indices, edits)


def moved(rendered: Rendered, filled: Filled) -> Rendered:
    """Map the spans of a text to the edited text; the edits' own text is not trained on."""
    (_, spans), left_out = rendered.marked, rendered.left_out
    if not filled.edits:
        return Rendered((filled.text, spans), left_out)
    edits = filled.edits

    def moved_offset(offset: int) -> int:
        """Map an offset of the text to the edited text; an offset inside of an edit becomes its end."""
        number = bisect_right(edits, offset, key=lambda edit: edit.start + 1)  # edits that begin before the offset
        edit = edits[number - 1]
        return max(edit.new_stop, offset - edit.stop + edit.new_stop) if number else offset

    new_spans, new_left_out = (
        [(first, last) for start, stop in each if (first := moved_offset(start)) < (last := moved_offset(stop))]
        for each in (spans, left_out)
    )
    written = [
        (edit.new_start, edit.new_stop)
        for edit in edits
        if any(start < edit.stop and edit.start < stop for start, stop in spans)
    ]
    return Rendered((filled.text, new_spans), [*new_left_out, *written])
