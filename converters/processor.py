"""Which processor measures samples: from what the user names, and what the rows are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import build_config
from ..errors import ConfigError
from ..processors import MEDIA_TYPES, ProcessorConfig
from ..processors.base import Processor

TYPES = ("chat", "text", "vision", "audio", "omni", "image", "bagel", "preference")
_OF_ROWS = {"messages": "chat", "text": "text", "preference": "preference"}  # schema of the rows -> type of processor
_WITHOUT_TOKENIZER = {
    "tokens": "the rows are tokens already: leave --tokenizer out",
    "image": "images are measured without a tokenizer: pass --processor image, and leave --tokenizer out",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorChoice:
    """What is known of a processor before the rows are.

    tokenizer: folder or hub id of a tokenizer, or of transformers' processor for types with media. type: one of TYPES;
    None for the one that reads what the rows are. settings: of a run's section `processor`, by name.
    Raises ConfigError for a type with a tokenizer that it does not read, or without the one that it needs.
    """

    tokenizer: str | Path | None = None
    type: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.type is not None and self.type not in TYPES:
            raise ConfigError(f"processor {self.type!r} is not known: choose one of {', '.join(TYPES)}")
        if self.type == "image" and self.tokenizer is not None:
            raise ConfigError("--processor image reads images, not texts: leave --tokenizer out")
        if self.tokenizer is None and self.type != "image":
            name, value = next(iter(self.settings.items()), ("", ""))
            named = f"--processor {self.type}" if self.type else f"--setting {name}={value}"
            raise ConfigError(f"{named} is for samples that become tokens: pass --tokenizer with its folder or hub id")

    def build(self, schema: str | None = None, *, has_media: bool = False) -> Processor:
        """The processor; schema: what the rows are stored as, None for chats. ConfigError for a wrong setting.

        has_media: the rows hold media, which the folder's processor reads if it reads any.
        """
        kind = self.type or ("chat" if schema is None else _OF_ROWS.get(schema))
        if kind is None:
            otherwise = "no processor reads them: leave --tokenizer out, or say what they are with --kind and --columns"
            raise ConfigError(f"the rows are {schema!r}: {_WITHOUT_TOKENIZER.get(str(schema), otherwise)}")
        of_folder = has_media and self.type is None
        values = {"type": None if of_folder and kind == "chat" else kind, **self.settings}
        if self.tokenizer is not None:
            values["path" if of_folder or kind in MEDIA_TYPES else "tokenizer"] = str(self.tokenizer)
        return build_config(ProcessorConfig, values, source="--setting" if self.settings else "--processor").build()


def nested_settings(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE texts as settings; a name with dots is one of a section.

    >>> nested_settings(["fps=1", "bagel.vae_max_side=768"])
    {'fps': '1', 'bagel': {'vae_max_side': '768'}}
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise ConfigError(f"--setting {text}: expected NAME=VALUE")
        *sections, name = name.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return values
