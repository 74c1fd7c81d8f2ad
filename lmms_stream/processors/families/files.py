"""A processor's folder or hub id -> its settings, in the format of transformers' save_pretrained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...versions.transformers import NESTED_SETTINGS_COME_FIRST

_IMAGE, _VIDEO, _PROCESSOR, _CONFIG = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "config.json",
)  # fmt: skip
_TEMPLATE, _OLD_TEMPLATE, _TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
_READ = (_IMAGE, _VIDEO, _PROCESSOR, _CONFIG, _TEMPLATE, _OLD_TEMPLATE, f"{_TEMPLATES}/*.jinja")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorFiles:
    """Settings of a folder. name: the folder or hub id. image, video, sound: settings of each kind's processor;
    processor: settings of the whole processor. config: of the model. sound, processor and config are {} without a file.

    processor_class: transformers' name of the class, "" without a file. chat_templates: by name; {} to use the
    tokenizer's.
    """

    name: str
    image: Mapping[str, Any]
    video: Mapping[str, Any]
    config: Mapping[str, Any]
    processor_class: str
    chat_templates: Mapping[str, str]
    sound: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False  # whether Python files of the folder may run

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))


def check_followed(values: Mapping[str, Any], followed: Mapping[str, Any], *, name: str) -> None:
    """Raise ConfigError for settings with unsupported values. followed: the supported values. name: the folder."""
    for key, value in followed.items():
        if values.get(key, value) != value:
            raise ConfigError(
                f"processor {name!r} has {key} {values[key]!r}, but only {value!r} is supported: save the processor "
                "again"
            )


def read_files(path: str) -> ProcessorFiles:
    """Read the settings of a folder. ConfigError for a folder without a processor of images, videos or sounds, and for
    unreadable files.
    """
    folder = Path(path) if Path(path).is_dir() else _of_hub(path)
    found = {name: _values(folder / name, path) for name in (_IMAGE, _VIDEO, _PROCESSOR, _CONFIG)}
    nested = found[_PROCESSOR]

    def settings(kind: str, file: str) -> Mapping[str, Any]:
        both = [nested.get(kind) or {}, found[file]]
        first, second = both if NESTED_SETTINGS_COME_FIRST else reversed(both)
        return first or second

    image = settings("image_processor", _IMAGE)
    # Older folders have no settings for videos; transformers then uses the settings of images.
    video = settings("video_processor", _VIDEO) or image
    sound = nested.get("feature_extractor") or found[_IMAGE]
    if not image and not sound:
        raise ConfigError(
            f"{path!r} holds no {_IMAGE}: name the folder or hub id of a processor that reads images, which "
            "save_pretrained of transformers' processors writes"
        )
    classes = (values.get("processor_class") for values in (nested, image, video, sound))
    return ProcessorFiles(
        name=path,
        image=image,
        video=video,
        config=found[_CONFIG],
        processor_class=next(filter(None, classes), ""),
        chat_templates=_chat_templates(folder, path),
        sound=sound,
        processor=nested,
    )


def has_media(path: str) -> bool:
    """Return whether a folder or hub id has a processor of media, or is of a model that reads media."""
    folder = Path(path) if Path(path).is_dir() else _of_hub(path)
    if any(_values(folder / name, path) for name in (_IMAGE, _VIDEO, _PROCESSOR)):
        return True
    config = _values(folder / _CONFIG, path)
    return any(name in config for name in ("vision_config", "audio_config", "thinker_config"))


def _of_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(_READ)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"processor {path!r} cannot be loaded: it is not a folder, and as a hub id: {first_line}"
        ) from error


def _values(file: Path, path: str) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"processor {path!r}: {file.name} cannot be read ({error}): save it again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"processor {path!r}: {file.name} holds no settings by name: save it again")
    return values


def _chat_templates(folder: Path, path: str) -> dict[str, str]:
    templates = {file.stem: file.read_text(encoding="utf-8") for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    if (folder / _TEMPLATE).exists():
        return {"default": (folder / _TEMPLATE).read_text(encoding="utf-8"), **templates}
    old = _values(folder / _OLD_TEMPLATE, path).get("chat_template") or {}
    if isinstance(old, list):
        old = {each["name"]: each["template"] for each in old}
    return {**({"default": old} if isinstance(old, str) else old), **templates}
