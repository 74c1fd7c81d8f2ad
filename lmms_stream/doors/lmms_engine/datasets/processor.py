"""LMMS Engine's processors by their names: images and messages -> input_ids, labels and tensors of images."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....errors import ConfigError, DataError
from ....mds.dataset_config import DatasetConfig
from ....processors.base import Processor
from .names import processor_of

__all__ = [
    "BagelDataProcessor",
    "BaseQwen2_5_DataProcessor",
    "DataProcessor",
    "LLaVADataProcessor",
    "LLaVAVideoDataProcessor",
    "ProcessorConfig",
    "PureTextDataProcessor",
    "Qwen2DataProcessor",
    "Qwen2VLDataProcessor",
    "Qwen2_5OmniDataProcessor",
    "Qwen2_5_VLDataProcessor",
    "Qwen3OmniMoeDataProcessor",
    "Qwen3_VLDataProcessor",
    "RaeSiglipDataProcessor",
    "SitDataProcessor",
]


@dataclass
class ProcessorConfig:
    """The section processor_config of a dataset."""

    processor_name: str
    processor_type: str
    extra_kwargs: dict[str, Any] = field(default_factory=dict)


class DataProcessor:
    """A processor of LMMS Engine's by its name, over ours. build() reads its folder; ConfigError before it.

    Messages may hold texts and images; other media are read by datasets alone.
    """

    dataset_type = "vision"

    def __init__(self, config: ProcessorConfig | Mapping[str, Any]):
        self.config = config if isinstance(config, ProcessorConfig) else ProcessorConfig(**config)
        self._made: Processor | None = None

    def build(self) -> None:
        said = {name: value for name, value in vars(self.config).items() if value}
        self._made = processor_of(DatasetConfig(dataset_type=self.dataset_type, processor_config=said))

    @property
    def processor(self) -> Processor:
        if self._made is None:
            raise ConfigError(f"the {type(self).__name__} is not built: call build() before")
        return self._made

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the folder."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.processor_name)

    def save_pretrained(self, path: str) -> None:
        """Write transformers' processor to a folder."""
        from transformers import AutoProcessor

        AutoProcessor.from_pretrained(self.config.processor_name).save_pretrained(path)

    def process(
        self,
        images: Sequence[Any] | None,
        hf_messages: Sequence[Mapping[str, Any]],
        audios: Any = None,
        sampling_rate: int | None = None,
        videos: Any = None,
        system_message: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return int64[T] input_ids and labels of a conversation, and tensors of its images by the model's names.

        images: of Pillow, as many as parts of type image. Answers of the assistant are trained on.
        """
        if audios is not None or videos is not None:
            raise ConfigError("audios and videos are read from files: name them in rows of a dataset")
        messages = [dict(each) for each in hf_messages]
        if system_message is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_message})
        media = _store(messages, list(images or ()))
        made = self.processor.process({"messages": json.dumps(messages), "media": media})
        of_media: Mapping[str, Any] = made.get("media") or {}
        return {name: torch.as_tensor(value) for name, value in ({**made, **of_media}).items() if name != "media"}


def _store(messages: Sequence[dict[str, Any]], images: Sequence[Any]) -> bytes:
    """Let parts of type image say where their image lies in the bytes that are returned."""
    stored, left = b"", list(images)
    for message in messages:
        if isinstance(message["content"], str):
            continue
        message["content"] = parts = [dict(part) for part in message["content"]]
        for part in parts:
            if part["type"] == "text":
                continue
            if not part["type"].startswith("image") or not left:
                raise DataError(f"a part of type {part['type']!r} has no image: give an image for each, in their order")
            image, data = left.pop(0).convert("RGB"), io.BytesIO()
            image.save(data, "PNG")
            span = [len(stored), len(data.getvalue())]
            stored += data.getvalue()
            part.clear()
            part |= {"type": "image", "mime": "image/png", "span": span, "width": image.width, "height": image.height}
    if left:
        raise DataError(f"{len(left)} images are left over: name each by a part of type image")
    return stored


Qwen2VLDataProcessor = Qwen2_5_VLDataProcessor = Qwen3_VLDataProcessor = DataProcessor
LLaVADataProcessor = LLaVAVideoDataProcessor = Qwen2DataProcessor = PureTextDataProcessor = DataProcessor
Qwen2_5OmniDataProcessor = Qwen3OmniMoeDataProcessor = BaseQwen2_5_DataProcessor = DataProcessor


class SitDataProcessor(DataProcessor):
    """The same of images with numbers of classes, which are to be made."""

    dataset_type = "sit"


class RaeSiglipDataProcessor(DataProcessor):
    """The same of images, which are to be made again."""

    dataset_type = "rae"


class BagelDataProcessor(DataProcessor):
    """The same of images to see and images to make."""

    dataset_type = "bagel"
