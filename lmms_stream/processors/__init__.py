"""Sample -> tokens, labels and media inputs: one module per kind of data.

base            the interface of a processor; spans of tokens that are trained on
lengths         lengths of samples, several at once
tokenizers      fast tokenizers and their threads; only this module and families/installed import transformers
byte_tokens     places of byte-level tokens in a text
json_text       JSON texts -> values, integers of any size unchanged; long texts value by value
stored_chat     a stored conversation -> its messages, checked
answers         a conversation, rendered once more with marks -> the text of each answer; thoughts after a prompt
chat_template   a conversation -> its text and marks; tokens that end its answers
not_shown       content that a template does not show, counted
conversation    a stored conversation -> its text, tokens and trained spans
chat, text      processors of texts and documents; token_kernels: the compiled loop that fills packs from shards
image           the processor of images to generate, and its settings
media/          bytes of media -> facts and pixels; families/: the special parts of each family of models
preference      processors of answers to compare, also with media
installed       families whose media are read by the processor of transformers; agreement: compares it with our code
multimodal      the processor of conversations with media, and the places of media in text
bagel_images    images as inputs of BAGEL's encoders
bagel           the processor of BAGEL's sequences of texts and images, and their attention
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..checks import check_fields
from ..config import build_config
from ..errors import ConfigError
from .bagel_images import BagelSettings
from .base import Compared, Processor
from .families.settings import MediaSettings
from .image import ImageSettings, Objective

if TYPE_CHECKING:
    from .conversation import Learn
    from .multimodal import MultimodalProcessor

MEDIA_TYPES = ("vision", "audio", "omni")  # synonyms: the processor's folder determines the media


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorConfig(MediaSettings, ImageSettings):
    """Processor of the samples: one section of a YAML file."""

    # The processor
    # None: "chat"; with a path, chats with the media that its processor reads (only text if it reads no media). "chat":
    # `messages`, by the chat template of a tokenizer; "text": the full text of each `text`; "tokens": samples tokenized
    # at conversion; "vision": chats with the media that the processor at `path` reads ("audio" and "omni" are other
    # names of "vision"); "image": images to generate; "preference": answers to compare; "bagel": texts, images to see
    # and images to generate
    type: Literal["chat", "tokens", "text", "vision", "audio", "omni", "image", "bagel", "preference"] | None = None
    # a local folder or hub id, for "chat", "text", "bagel" and "preference"
    tokenizer: str | None = None
    # a local folder or hub id of a transformers processor, for "vision", and for "preference" with media
    path: str | None = None
    # answers of a chat that are trained on: all messages of the assistant, or only the last message, for templates that
    # change earlier messages (Qwen3's drops their thoughts)
    learn: Literal["all", "last"] = "all"
    # of chats, whether the next speaker's token is trained on, if only this token ends the template's answers (GLM's)
    learn_stop: bool = False
    bagel: BagelSettings | None = None  # of "bagel": settings of BAGEL's sequences (see docs/bagel.md)
    # the task of the samples: of "preference" dpo (the default, pairs) or kto (single answers), of "image"
    # flow_matching (the default with crop "center") or reconstruction (with "random")
    objective: Objective | Compared | None = None
    text_prefix: str | None = None  # of "text": written before each text instead of special tokens; "" for nothing
    text_suffix: str | None = None  # of "text": written after each text instead of special tokens; "" for nothing
    # of "tokens": separate attention of documents that were concatenated at conversion (--concat)
    isolate_documents: bool = False
    # run the Python files in the folder or repository of the tokenizer or processor (true if model.trust_remote_code
    # is true); without it, a folder that needs them is refused
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_fields(self, prefix="processor.", paths=("tokenizer", "path"))
        self._check_media()
        self._check_sizes()
        chats, of_media = ("chat", *MEDIA_TYPES), ("vision", *MEDIA_TYPES, *(("preference",) if self.path else ()))
        kinds_of = {
            **dict.fromkeys((each.name for each in fields(ImageSettings)), ("image",)),
            **dict.fromkeys(("path", *(each.name for each in fields(MediaSettings))), of_media),
            **dict.fromkeys(("learn", "learn_stop"), chats),
            **{
                "bagel": ("bagel",),
                "text_prefix": ("text",),
                "text_suffix": ("text",),
                "isolate_documents": ("tokens",),
            },
        }
        for each in fields(self):
            kinds = kinds_of.get(each.name, (self.kind,))
            if getattr(self, each.name) != each.default and self.kind not in kinds:
                asked = "chats, and processor.type" if kinds is chats else f"processor.type {kinds[0]}, and that"
                raise ConfigError(f"processor.{each.name} is for {asked} is {self.kind}: leave {each.name} out")
        self._check_objective()
        if self.tokenizer is not None and self.kind == "image":
            raise ConfigError("processor.tokenizer is for texts, and processor.type is image: leave it out")
        if self.tokenizer is not None and self.kind in MEDIA_TYPES:
            raise ConfigError(f"processor.tokenizer is for texts, and processor.type is {self.kind}: name path instead")
        if self.tokenizer is not None and self.path is not None:
            raise ConfigError("processor.tokenizer and processor.path are both named: path has a tokenizer of its own")

    def _check_objective(self) -> None:
        known = {"image": get_args(Objective), "preference": get_args(Compared)}.get(self.kind, ())
        if self.objective is None or self.objective in known:
            return
        remedy = f"choose {' or '.join(known)}" if known else "leave objective out"
        raise ConfigError(f"processor.type {self.kind} has no objective {self.objective}: {remedy}")

    def build(self) -> Processor:
        if self.kind == "tokens":
            from .text import DocumentsProcessor, TokensProcessor

            return DocumentsProcessor() if self.isolate_documents else TokensProcessor()
        trusts = self.trust_remote_code
        if self.type is None and self.path is not None and not has_processor_of_media(self.path):
            from .chat import ChatProcessor

            return ChatProcessor.from_pretrained(
                self.path, learn=self.learn, learn_stop=self.learn_stop, trust_remote_code=trusts
            )
        if self.kind in MEDIA_TYPES:
            return self._of_media(learn=self.learn, learn_stop=self.learn_stop)
        if self.kind == "image":
            from .image import ImageProcessor

            return ImageProcessor.of(self)
        if self.kind == "preference" and self.path is not None:
            from .preference import MediaPreferenceProcessor

            return MediaPreferenceProcessor(self._of_media(learn="last", learn_stop=None), objective=self._compared)
        if not self.tokenizer:
            raise ConfigError("processor.tokenizer is missing: name the folder or hub id of a tokenizer")
        if self.kind == "text":
            from .text import TextProcessor

            return TextProcessor.from_pretrained(
                self.tokenizer, prefix=self.text_prefix, suffix=self.text_suffix, trust_remote_code=trusts
            )
        if self.kind == "preference":
            from .preference import PreferenceProcessor

            return PreferenceProcessor.from_pretrained(
                self.tokenizer, objective=self._compared, trust_remote_code=trusts
            )
        if self.kind == "bagel":
            from .bagel import BagelProcessor

            return BagelProcessor.from_pretrained(self.tokenizer, self.bagel, trust_remote_code=trusts)
        from .chat import ChatProcessor

        return ChatProcessor.from_pretrained(
            self.tokenizer, learn=self.learn, learn_stop=self.learn_stop, trust_remote_code=trusts
        )

    @property
    def kind(self) -> str:
        """Processor type, before the folder of `path` is read."""
        return self.type or ("chat" if self.path is None else "vision")

    @property
    def _compared(self) -> Compared:
        return "kto" if self.objective == "kto" else "dpo"

    def _of_media(self, *, learn: Learn, learn_stop: bool | None) -> MultimodalProcessor:
        from .multimodal import MultimodalProcessor

        if not self.path:
            raise ConfigError("processor.path is missing: name the folder or hub id of a processor of transformers'")
        settings = {each.name: getattr(self, each.name) for each in fields(MediaSettings)}
        return MultimodalProcessor.from_pretrained(
            self.path, learn=learn, learn_stop=learn_stop, trust_remote_code=self.trust_remote_code, **settings
        )


def has_processor_of_media(path: str) -> bool:
    """Return whether a folder or hub id has a processor of media, or is of a model that reads media."""
    from .families.files import has_media

    return has_media(path)


# Which processor measures samples: chosen by the user's settings and the schema of the rows.

TYPES = ("chat", "text", "tokens", "vision", "audio", "omni", "image", "bagel", "preference")
_WITHOUT_TEXTS = {"image": "images", "tokens": "tokens"}  # type -> rows measured without a tokenizer
_OF_ROWS = {"messages": "chat", "text": "text", "preference": "preference"}  # schema of the rows -> type of processor
_WITHOUT_TOKENIZER = {
    "tokens": "the rows are tokens already: leave --tokenizer out (--processor tokens counts the tokens)",
    "image": "images are measured without a tokenizer: pass --processor image, and leave --tokenizer out",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorChoice:
    """Settings of a processor, before the schema of the rows is known.

    tokenizer: folder or hub id of a tokenizer, or of a transformers processor for types with media. type: a name in
    TYPES, or None for the type that matches the rows. settings: of a run's section `processor`, by name. Raises
    ConfigError for a type that does not read the tokenizer, or without a tokenizer that the type needs.
    """

    tokenizer: str | Path | None = None
    type: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.type is not None and self.type not in TYPES:
            raise ConfigError(f"processor {self.type!r} is not known: choose one of {', '.join(TYPES)}")
        if self.type in _WITHOUT_TEXTS and self.tokenizer is not None:
            read = _WITHOUT_TEXTS[self.type]
            raise ConfigError(f"--processor {self.type} reads {read}, not texts: leave --tokenizer out")
        if self.tokenizer is None and self.type not in _WITHOUT_TEXTS:
            name, value = next(iter(self.settings.items()), ("", ""))
            named = f"--processor {self.type}" if self.type else f"--setting {name}={value}"
            raise ConfigError(f"{named} needs tokens: pass --tokenizer with a folder or hub id")

    def build(self, schema: str | None = None, *, has_media: bool = False) -> Processor:
        """Build the processor. schema: schema of the stored rows, None for chats. ConfigError for a wrong setting.

        has_media: the rows hold media, for a processor of the folder that reads media. Convert, index, verify, inspect,
        plan and simulate choose only by this rule.
        """
        kind = self.type or ("chat" if schema is None else _OF_ROWS.get(schema))
        if kind is None:
            otherwise = "no processor reads them: leave --tokenizer out, or say what they are with --kind and --columns"
            raise ConfigError(f"the rows are {schema!r}: {_WITHOUT_TOKENIZER.get(str(schema), otherwise)}")
        of_folder = has_media and self.type is None and has_processor_of_media(str(self.tokenizer))
        values = {"type": "vision" if of_folder and kind == "chat" else kind, **self.settings}
        if self.tokenizer is not None:
            values["path" if of_folder or kind in MEDIA_TYPES else "tokenizer"] = str(self.tokenizer)
        return build_config(ProcessorConfig, values, source="--setting" if self.settings else "--processor").build()


def reader_of(columns: Sequence[str]) -> str | None:
    """Return the name of a processor for stored columns, for a command, a YAML file and Python; None without."""
    from .chat import ChatProcessor
    from .image import ImageProcessor
    from .text import TextProcessor, TokensProcessor

    readers = (
        ("--tokenizer …", "{type: chat, tokenizer: …}", ChatProcessor.__name__, ChatProcessor.columns),
        ("--tokenizer …", "{type: text, tokenizer: …}", TextProcessor.__name__, TextProcessor.columns),
        ("--processor tokens", "{type: tokens}", TokensProcessor.__name__, TokensProcessor.columns),
        ("--processor image", "{type: image}", ImageProcessor.__name__, ImageProcessor.columns),
    )
    for option, section, name, needed in readers:
        if {*needed} <= {*columns}:
            return f"{option} for a command, processor: {section} in a YAML file, or {name} in Python"
    return None
