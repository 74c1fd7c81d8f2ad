"""A row -> a sample: the text of its prompt by a chat template, its media, its length."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import repeat
from typing import Any

import orjson

from ...converters.rows.chat import with_calls
from ...converters.rows.chat_kinds import IN_PYTHON, are_messages
from ...converters.rows.fields import unpacked
from ...converters.rows.references import SampleMedia
from ...errors import ConfigError, DataError
from ...extras import need
from ...processors.chat_template import ChatTemplate, without_nulls
from ...processors.families.qwen_vl import fitting
from ...processors.families.vision import Vision
from ...processors.media.facts import media_part
from ...processors.media.images import decode_image
from ...processors.stored_chat import check_values
from ...processors.tokenizers import FastTokenizer, load_tokenizer
from .rows import Read
from .sample import Sample

OVERLONG = "overlong"
TEACHER_PROMPT = "opd_teacher_prompt"  # in metadata
logger = logging.getLogger("lmms_stream")
Outcome = Sample | DataError | str  # a sample; a row's error; OVERLONG
_SET_HERE = ("tokenize", "tools", "messages", "conversation", "return_tensors", "return_dict")


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """See BaseDataset for the fields."""

    tokenizer: Any = None
    processor: Any = None
    max_length: int | None = None
    prompt_key: str = "text"
    multimodal_keys: Mapping[str, str] | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    system_prompt: str | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] | None = None
    custom_prompt_func: Callable[[Any, dict[str, Any]], Any] | None = None
    multimodal_config: MultimodalConfig | None = None
    teacher_prompt_key: str | None = None
    teacher_multimodal_keys: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_multimodal_keys(self.multimodal_keys)
        check_multimodal_keys(self.teacher_multimodal_keys)
        if self.max_length is not None and not isinstance(self.max_length, int):
            raise ConfigError(f"max_length must be a whole number of tokens, got {self.max_length!r}: give an int")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length must be at least 1, got {self.max_length}: leave it out for no limit")
        if self.tokenizer is None and (self.apply_chat_template or self.max_length is not None):
            raise ConfigError("apply_chat_template and max_length need a tokenizer: pass one, or its folder")
        if not isinstance(self.apply_chat_template_kwargs or {}, Mapping):
            raise ConfigError(
                f"apply_chat_template_kwargs must be a dict, got {self.apply_chat_template_kwargs!r}: write "
                '{"NAME": VALUE}'
            )
        if not isinstance(self.system_prompt, str | None):
            raise ConfigError(f"system_prompt must be a text, got {self.system_prompt!r}: write one, or leave it out")
        if self.custom_prompt_func is not None and not callable(self.custom_prompt_func):
            raise ConfigError(
                f"custom_prompt_func must be a function of (prompt, row), got {self.custom_prompt_func!r}: pass such a "
                "function (--custom-prompt-path names it)"
            )
        for name in _SET_HERE:
            if name in (self.apply_chat_template_kwargs or {}):
                raise ConfigError(
                    f"apply_chat_template_kwargs cannot set {name!r}, which the dataset sets itself: leave it out"
                )
        if self.apply_chat_template:
            _ = self._template  # raises for a tokenizer without a template

    @property
    def columns(self) -> list[str]:
        """Columns to read; [] for all columns."""
        if self.custom_prompt_func is not None:
            return []
        named = (self.prompt_key, self.label_key, self.tool_key, self.metadata_key, self.teacher_prompt_key)
        media = [*(self.multimodal_keys or {}).values(), *(self.teacher_multimodal_keys or {}).values()]
        return [*filter(None, named), *media]

    def look_at(self, rows: Sequence[Any]) -> None:
        """Warn of columns of media and of teachers' prompts missing in the first rows."""
        media = [*(self.multimodal_keys or {}).values(), *(self.teacher_multimodal_keys or {}).values()]
        present = {name for row in rows if isinstance(row, Mapping) for name in row}
        missing = {*media, *filter(None, [self.teacher_prompt_key])} - present
        if missing and present:
            logger.warning(
                "none of the first %d rows has the column %s of multimodal_keys or of the teacher, so their prompts "
                "lack it: correct the name if it is misspelt",
                len(rows), ", ".join(map(repr, sorted(missing))),
            )  # fmt: skip

    def make(self, read: Read) -> list[Outcome]:
        """Return the outcome of each row."""
        return self.measured(self._plain(read.rows) or [self._made(read, index) for index in range(len(read.rows))])

    def measured(self, made: list[Outcome]) -> list[Outcome]:
        """Return the outcomes, with OVERLONG for samples of more than max_length tokens."""
        if self.max_length is None:
            return made
        texts = [index for index, each in enumerate(made) if isinstance(each, Sample) and not each.multimodal_inputs]
        for index, length in zip(texts, self._lengths([made[index] for index in texts]), strict=True):
            if length > self.max_length:
                made[index] = OVERLONG
        for index, each in enumerate(made):
            if isinstance(each, Sample) and each.multimodal_inputs and self._media_length(each) > self.max_length:
                made[index] = OVERLONG
        return made

    @cached_property
    def _changes_prompts(self) -> bool:
        """Whether settings can change a text prompt, or add tools or media to it."""
        given = (self.system_prompt, self.tool_key, self.custom_prompt_func, self.teacher_prompt_key)
        if any(each is not None for each in given):
            return True
        return bool(self.apply_chat_template or self.multimodal_keys or self.teacher_multimodal_keys)

    def _plain(self, rows: Sequence[Any]) -> list[Outcome] | None:
        """Return the samples of all rows at once if every prompt is a text to keep unchanged; else None."""
        if self._changes_prompts:
            return None
        try:
            prompts = [row[self.prompt_key] for row in rows]
            labels = repeat(None) if self.label_key is None else [row[self.label_key] for row in rows]
            metadata = [row.get(self.metadata_key) or {} for row in rows]
        except (KeyError, TypeError):  # a row without the column, or an unreadable row
            return None
        if {*map(type, prompts)} != {str} or {*map(type, metadata)} != {dict} or not all(prompts):
            return None
        return [*map(Sample.of, prompts, labels, metadata)]

    def _made(self, read: Read, index: int) -> Outcome:
        row = read.rows[index]
        if isinstance(row, DataError):
            return row
        try:
            return self.sample(row, read.folder(index))
        except DataError as error:
            return DataError(f"{read.name(index)}: {error}")

    def sample(self, row: dict[str, Any], folder: str | None) -> Sample:
        """Return the sample of a row, ignoring max_length. folder: base of relative media paths. Raises DataError."""
        metadata = self._metadata(row)
        tools = tools_of(row, self.tool_key)
        if tools is not None:
            metadata["tools"] = tools
        text, media = self._prompt(row, self.prompt_key, self.multimodal_keys, tools, folder)
        if self.label_key is not None and self.label_key not in row:
            raise DataError(f"there is no {self.label_key!r}: name another label_key, or leave it out")
        teacher_media = None
        asked = self.teacher_multimodal_keys or None
        if self.teacher_prompt_key is not None:
            asked = row.get(self.teacher_prompt_key)
        if asked is not None:
            key, keys = self.teacher_prompt_key or self.prompt_key, self.teacher_multimodal_keys or self.multimodal_keys
            teacher_text, shown = self._prompt(row, key, keys, tools, folder)
            if self.teacher_prompt_key is not None:
                metadata[TEACHER_PROMPT] = teacher_text
            teacher_media = shown if self.teacher_multimodal_keys else None
        label = row[self.label_key] if self.label_key is not None else None
        return Sample.of(text, label, metadata, media, teacher_media)

    def _prompt(
        self,
        row: dict[str, Any],
        key: str,
        multimodal_keys: Mapping[str, str] | None,
        tools: list[Any] | None,
        folder: str | None,
    ) -> tuple[Any, dict[str, Any] | None]:
        """Return the model's prompt from a column, and its media."""
        prompt = row.get(key)
        if self.custom_prompt_func is not None:
            try:
                prompt = self.custom_prompt_func(prompt, row)
            except Exception as error:
                raise DataError(
                    f"custom_prompt_func (--custom-prompt-path) raised {error!r} for {_shown(prompt)}: correct it, or "
                    "the row"
                ) from error
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(
                f"{key!r} is {_shown(prompt)}, not a text or a list of messages: its columns are "
                f"{', '.join(map(repr, row))}; name the prompt's by prompt_key (--input-key)"
            )
        as_messages = self.apply_chat_template or multimodal_keys or self.system_prompt is not None
        if as_messages or isinstance(prompt, list):
            prompt = messages_of(prompt, system_prompt=self.system_prompt)
        if multimodal_keys and isinstance(prompt, list):
            prompt = with_media(prompt, row, multimodal_keys)
        if not isinstance(prompt, list):
            return prompt, None
        plain, media = plain_parts(prompt), None
        if self.processor is not None:
            media = _media_of(plain, SampleMedia(folder), row.get("media"), self._image_sides)
        elif self.apply_chat_template:
            _refuse_media(plain)
        return self._rendered(plain, tools) if self.apply_chat_template else [*without_nulls(prompt)], media

    @cached_property
    def _image_sides(self) -> Vision | None:
        """Limits on the sides of images; None for no limit."""
        if self.multimodal_config is None:
            return None
        patch_size = int(getattr(getattr(self.processor, "image_processor", None), "patch_size", None) or 14)
        token, config = (2 * patch_size) ** 2, self.multimodal_config
        settings = {
            "patch_size": patch_size,
            "min_pixels": config.image_min_token_num * token,
            "max_pixels": config.image_max_token_num * token,
        }
        return Vision.of(settings, name="multimodal_config")

    def _metadata(self, row: Mapping[str, Any]) -> dict[str, Any]:
        value = row.get(self.metadata_key) or {}
        if not isinstance(value, Mapping):
            raise DataError(f"{self.metadata_key!r} is {_shown(value)}, not an object: name another metadata_key")
        return dict(value)

    def _rendered(self, messages: Messages, tools: list[Any] | None) -> str:
        template, prompt = self._template
        with self._lock:  # a template records marked spans while it renders
            return template.render(messages, tools, prompt=prompt)[0]

    def _lengths(self, samples: Sequence[Outcome]) -> list[int]:
        texts = [each.prompt for each in samples if isinstance(each, Sample)]
        for text in texts:
            if not isinstance(text, str):
                raise ConfigError(
                    "max_length counts the tokens of texts, and a prompt is a list of messages: set "
                    "apply_chat_template, or leave max_length (--rollout-max-prompt-len) out"
                )
        return self._fast_tokenizer.num_tokens([str(text) for text in texts], add_special_tokens=False)

    def _media_length(self, sample: Sample) -> int:
        media = sample.multimodal_inputs or {}
        if set(media) != {"images"} or not callable(self.processor) or not isinstance(sample.prompt, str):
            raise ConfigError(
                f"max_length cannot count prompts with {', '.join(media)}: it counts images by a processor of "
                "transformers' and apply_chat_template; leave max_length out, or filter the rows before"
            )
        return len(self.processor(text=sample.prompt, images=media["images"])["input_ids"][0])

    @cached_property
    def _fast_tokenizer(self) -> FastTokenizer:
        if isinstance(self.tokenizer, str):
            return load_tokenizer(self.tokenizer)
        return FastTokenizer.of(self.tokenizer)

    @cached_property
    def _template(self) -> tuple[ChatTemplate, bool]:
        """The template, and whether to add a generation prompt."""
        tokenizer = self._fast_tokenizer
        settings = dict(self.apply_chat_template_kwargs or {})
        prompt = bool(settings.pop("add_generation_prompt", True))
        source = settings.pop("chat_template", None) or tokenizer.chat_templates.get("default")
        if source is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name} has no chat template: set tokenizer.chat_template and save it, or leave "
                "apply_chat_template out"
            )
        return ChatTemplate(
            tokenizer.chat_templates.get(source, source), {**tokenizer.special_tokens, **settings}
        ), prompt

    @cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"


def _media_of(messages: Messages, media: SampleMedia, stored: Any, image_sides: Vision | None) -> dict[str, Any] | None:
    """Return media in the order of messages: images decoded as RGB, other media as bytes; None without media."""
    found: dict[str, list[Any]] = {}
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type")
            if kind not in KINDS:
                continue
            if part.get("span") is not None and isinstance(stored, bytes):
                data = media_part(part, stored).data
            else:
                data = media.read(part.get(kind))
            found.setdefault(f"{kind}s", []).append(_image(data, image_sides) if kind == "image" else data)
    return found or None


def _refuse_media(messages: Messages) -> None:
    """Raise DataError for media in messages to be rendered as text: the text would lose them."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] in KINDS:
                raise DataError(
                    f"the prompt holds media of kind {part['type']}, but no processor for media is set: pass one to "
                    'Dataset, or set --multimodal-keys \'{"image": "images"}\', for media in columns'
                )


def _image(data: bytes, sides: Vision | None) -> Any:
    need("PIL", by="images")
    from PIL import Image

    image = Image.fromarray(decode_image(data))
    if sides is None:
        return image
    height, width = fitting(image.height, image.width, sides)
    return image.resize((width, height))


# MultimodalConfig: limits on the media of prompts, by Relax's names and with its defaults.

_HEARD = ("image_max_token_num", "image_min_token_num")


@dataclass(frozen=True)
class MultimodalConfig:
    """Limits on images. image_min_token_num, image_max_token_num: tokens of an image; images are resized to fit.

    Videos and sounds stay undecoded bytes: ConfigError for a limit on them that is not the default.
    """

    image_max_token_num: int = 16384
    image_min_token_num: int = 4
    image_resize_scale_factor: int | None = None
    video_min_token_num: int = 128
    video_max_token_num: int = 768
    video_fps: float = 2.0
    video_fps_min_frames: int = 4
    video_fps_max_frames: int = 768
    audio_sample_rate: int = 16000
    frame_factor: int = 2

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in _HEARD and value != each.default:
                raise ConfigError(
                    f"{each.name} is {value!r}, which is not supported: leave it out, and resize or sample where the "
                    "media are decoded, or prepare the rows"
                )
        if not 1 <= self.image_min_token_num <= self.image_max_token_num:
            raise ConfigError(
                f"image_min_token_num is {self.image_min_token_num} and image_max_token_num "
                f"{self.image_max_token_num}: set 1 <= minimum <= maximum"
            )

    @classmethod
    def from_args(cls, args: Any) -> MultimodalConfig:
        """Return the limits set in args; defaults for values of None."""
        given = {each.name: getattr(args, each.name, None) for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


# A row's prompt, media and tools -> messages for chat templates. Pure.

KINDS = ("image", "video", "audio")
Messages = list[dict[str, Any]]


def check_multimodal_keys(keys: Mapping[str, str] | None) -> None:
    if keys is not None and not isinstance(keys, Mapping):
        raise ConfigError(f'multimodal_keys must be a kind of media -> column, got {keys!r}: write {{"image": COLUMN}}')
    for kind in keys or ():
        if kind not in KINDS:
            raise ConfigError(f"multimodal_keys names media of kind {kind!r}: expected {', '.join(KINDS)}")


def messages_of(prompt: str | list[Any], *, system_prompt: str | None) -> Messages:
    """Return the conversation of a prompt; a text becomes a user message. DataError for an invalid prompt."""
    if isinstance(prompt, str):
        if are_messages(unpacked(prompt)) or IN_PYTHON.match(prompt):
            raise DataError(
                f"the prompt is a list of messages as text ({prompt[:60]!r}), which would become the user's message "
                "unchanged: write a list, or parse the text by custom_prompt_func (--custom-prompt-path), for example "
                "json.loads"
            )
        messages: Messages = [{"role": "user", "content": prompt}]
    else:
        for message in prompt:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise DataError(f"a message of the prompt has no role ({str(message)[:80]!r}): write role and content")
        messages = [
            with_calls({name: value for name, value in message.items() if value is not None or name == "content"})
            for message in prompt
        ]
        for message in messages:
            check_values(message)
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def plain_parts(messages: Messages) -> Messages:
    """Return messages whose parts name a medium by its kind; parts in OpenAI's form (image_url) are rewritten.

    DataError for a part of another type: no model input would use it.
    """
    return [
        message | {"content": [_plain_part(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _plain_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", *KINDS):
        return dict(part)
    medium = str(kind).removesuffix("_url")
    if medium not in KINDS or medium == kind:
        raise DataError(
            f"a part of the prompt has the type {kind!r} ({str(part)[:80]}), which nothing reads: write text, "
            f"{', '.join(KINDS)}, or one of {', '.join(f'{each}_url' for each in KINDS)}"
        )
    value = part.get(kind)
    url = value.get("url") if isinstance(value, Mapping) else value
    if url is None:
        raise DataError(f'a part of type {kind!r} has no url ({str(part)[:80]}): write {{"{kind}": {{"url": …}}}}')
    return {"type": medium, medium: url}


def with_media(messages: Messages, row: Mapping[str, Any], keys: Mapping[str, str]) -> Messages:
    """Return the messages with a part per medium: <image>, <video> and <audio> take the next medium of the row's lists.

    A part with only a kind also takes the next medium; a part with a medium keeps it. DataError unless the number of
    media equals the number of slots.
    """
    waiting = {kind: _media(row, kind, key) for kind, key in keys.items()}
    taken = dict.fromkeys(waiting, 0)

    def take(kind: str) -> dict[str, Any]:
        taken[kind] += 1
        if taken[kind] > len(waiting[kind]):
            raise DataError(
                f"the prompt has more slots for media of kind {kind} (<{kind}>) than the {len(waiting[kind])} in "
                f"{keys[kind]!r}: correct the row"
            )
        return {"type": kind, kind: waiting[kind][taken[kind] - 1]}

    pattern = re.compile("(" + "|".join(f"<{kind}>" for kind in waiting) + ")")

    def split(text: str) -> list[dict[str, Any]]:
        pieces = [piece for piece in pattern.split(text) if piece]
        return [take(piece[1:-1]) if pattern.fullmatch(piece) else {"type": "text", "text": piece} for piece in pieces]

    def parts(content: Any) -> Any:
        if isinstance(content, str):
            return split(content)
        if not isinstance(content, Sequence):
            return content
        made: list[dict[str, Any]] = []
        for part in content:
            kind = str(part.get("type")).removesuffix("_url")
            if kind == "text":
                made += split(part.get("text") or "")
            else:
                has_medium = kind not in waiting or any(
                    part.get(name) not in (None, {}) for name in part if name != "type"
                )
                made.append(part if has_medium else take(kind))
        return made

    made = [
        message | {"content": parts(message["content"])} if "content" in message else message for message in messages
    ]
    for kind, media in waiting.items():
        if taken[kind] != len(media):
            raise DataError(
                f"{len(media) - taken[kind]} of the {len(media)} media in {keys[kind]!r} have no <{kind}> in the "
                "prompt: correct the row"
            )
    return made


def _media(row: Mapping[str, Any], kind: str, key: str) -> list[Any]:
    value = row.get(key)
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping):
        return [value]
    if not isinstance(value, Sequence):
        raise DataError(f"{key!r} holds {type(value).__name__}, not media of kind {kind}: write a list of them")
    return list(value)


def tools_of(row: Mapping[str, Any], key: str | None) -> list[Any] | None:
    """Return a row's tools, stored as a list or as JSON text; None if the row has no tools."""
    value = row.get(key) if key is not None else None
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{key!r} is not valid JSON ({error.msg}): write a list of tools, or its JSON") from error
    if not isinstance(value, list):
        raise DataError(f"{key!r} holds {type(value).__name__}, not a list of tools: write a list, or its JSON")
    return value
