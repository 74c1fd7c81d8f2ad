"""Which processor a command reads samples with: --tokenizer, --processor and --setting, wherever they are options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..processors import ProcessorChoice
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
    parser.add_argument(
        "--learn-stop",
        action="append_const",
        dest="setting",
        const="learn_stop=true",
        help="train also on the next token that the chat template writes after an answer, in templates without a token "
        "of their own that ends answers, as GLM's; short for --setting learn_stop=true",
    )


def processor_choice(tokenizer: str | None, kind: str | None, settings: Sequence[str]) -> ProcessorChoice | None:
    """What the options say of a processor; None without any of them. ConfigError for options that do not fit."""
    if tokenizer is None and kind is None and not settings:
        return None
    from ..converters.options import nested_settings
    from ..processors import ProcessorChoice

    return ProcessorChoice(tokenizer=tokenizer, type=kind, settings=nested_settings(settings))


def add_on_dropped(parser: Options) -> None:
    """--on-dropped."""
    parser.add_argument(
        "--on-dropped",
        choices=("error", "warn"),
        default="error",
        help="take rows whose tools or tool calls the chat template does not show for errors, or only count them; "
        "default: %(default)s",
    )


def stored_processor(remote: str, options: argparse.Namespace) -> Processor | None:
    """What reads a dataset's samples, as the options or the samples say; None without any of the options."""
    choice = processor_choice(options.tokenizer, options.processor, options.setting)
    if choice is None:
        return None
    from ..converters.stored import catalog

    return catalog.stored_processor(remote, choice)
