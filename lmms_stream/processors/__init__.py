"""Sample -> tokens, labels and media inputs: one module per kind of data.

base            what a processor is; spans: which tokens are learnt
measured        the lengths of samples, several at once
tokenizers      fast tokenizers, the only file that imports transformers; parallelism: their threads
byte_tokens     where the tokens of byte-level tokenizers lie, told from their ids
json_text       JSON texts -> values, integers of any size as they are
stored_chat     a stored conversation -> its messages, checked
chat_template   a conversation -> its text, and what of it is marked
conversation    a stored conversation -> its text and tokens, and which of them are learnt
chat, text      the processors of texts; token_kernels: the compiled loop that fills packs from shards
media/          bytes of media -> facts and pixels; families/: what is special about a family of models
placeholders    where media stand in a text
multimodal      the processor of conversations with media
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ..errors import ConfigError
from .base import Processor
from .families.settings import MediaSettings

MEDIA_TYPES = ("vision", "audio", "omni")  # names of one type: the processor's folder says which media it reads


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorConfig(MediaSettings):
    """Which processor reads the samples, as one section of a YAML file.

    type: "chat" renders `messages` with the tokenizer's chat template; "tokens" takes samples that were
    tokenized at conversion; "text" learns all of each `text`; "vision" is "chat" with media, of the kinds that the
    processor at `path` reads, and "audio" and "omni" are other names of it. tokenizer: a local folder or a hub id, for
    "chat" and "text". path: the same of a processor of transformers', for "vision", and so are the settings of media.
    learn: for "chat" and "vision", whether all that the assistant says is learnt, or its last message alone, which is
    what templates allow that change earlier messages (Qwen3's drops their thoughts).
    """

    type: Literal["chat", "tokens", "text", "vision", "audio", "omni"] = "chat"
    tokenizer: str | None = None
    path: str | None = None
    learn: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        MediaSettings.__post_init__(self)
        if self.learn != "all" and self.type not in ("chat", *MEDIA_TYPES):
            raise ConfigError(f"processor.learn is for chats, and processor.type is {self.type}: leave learn out")
        if self.type in MEDIA_TYPES:
            if self.tokenizer is not None:
                raise ConfigError(
                    f"processor.tokenizer is for texts, and processor.type is {self.type}: name path instead"
                )
            return
        for name in ("path", *(field.name for field in fields(MediaSettings))):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"processor.{name} is for processor.type vision, and that is {self.type}: leave {name} out"
                )

    def build(self) -> Processor:
        if self.type == "tokens":
            from .text import TokensProcessor

            return TokensProcessor()
        if self.type in MEDIA_TYPES:
            return self._of_media()
        if not self.tokenizer:
            raise ConfigError("processor.tokenizer is missing: name the folder or hub id of a tokenizer")
        if self.type == "text":
            from .text import TextProcessor

            return TextProcessor.from_pretrained(self.tokenizer)
        from .chat import ChatProcessor

        return ChatProcessor.from_pretrained(self.tokenizer, learn=self.learn)

    def _of_media(self) -> Processor:
        from .multimodal import MultimodalProcessor

        if not self.path:
            raise ConfigError("processor.path is missing: name the folder or hub id of a processor of transformers'")
        settings = {field.name: getattr(self, field.name) for field in fields(MediaSettings)}
        return MultimodalProcessor.from_pretrained(self.path, learn=self.learn, **settings)
