"""Which processor a command reads samples with: --tokenizer, --processor and --setting, wherever they are options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..processors.base import Processor

PAIRS = ("--setting",)  # options whose values read NAME=VALUE


class Options(Protocol):
    """A parser or a group of one."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action: ...


def add_options(
    parser: Options, *, default: str = "what the dataset holds, texts, chats or answers to compare"
) -> None:
    """--processor and --setting. default: the processor without them, in words."""
    parser.add_argument(
        "--processor",
        choices=("chat", "text", "vision", "audio", "omni", "image", "bagel", "preference"),
        help="read samples as this; vision, audio, omni: chats with media, where --tokenizer names a processor's "
        "folder or hub id; image: images that are to be made, without --tokenizer; bagel: chats with images to see "
        f"and to make; preference: answers to compare; default: {default}",
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set what a run sets in its section processor, for the same lengths: image_max_pixels=200704, fps=1, …",
    )


def chosen_processor(tokenizer: str | None, kind: str | None, settings: Sequence[str]) -> Processor | None:
    """The processor of that kind; None where no kind is chosen. ConfigError for settings that it does not have."""
    if kind is None and not settings:
        return None
    from ..config import build_config
    from ..processors import MEDIA_TYPES, ProcessorConfig

    if kind == "image" and tokenizer is not None:
        raise ConfigError("--processor image reads images, not texts: leave --tokenizer out")
    if tokenizer is None and kind != "image":
        named = f"--processor {kind}" if kind else f"--setting {settings[0]}"
        raise ConfigError(f"{named} is for samples that become tokens: pass --tokenizer with its folder or hub id")
    values: dict[str, Any] = {"type": kind or "chat"}
    if tokenizer is not None:
        values["path" if kind in MEDIA_TYPES else "tokenizer"] = tokenizer
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not (name and separator):
            raise ConfigError(f"--setting {setting}: expected NAME=VALUE")
        *sections, name = name.split(".")
        section = values
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return build_config(ProcessorConfig, values, source="--setting" if settings else "--processor").build()


def stored_processor(remote: str, options: argparse.Namespace) -> Processor | None:
    """What reads a dataset's samples, as the options say, or its schema; None without a tokenizer."""
    from ..converters.stored import catalog

    chosen = chosen_processor(options.tokenizer, options.processor, options.setting)
    if chosen is not None or options.tokenizer is None:
        return chosen
    return catalog.stored_processor(remote, options.tokenizer)
