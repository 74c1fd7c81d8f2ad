"""LMMS Engine's processors by their names: messages and media -> input_ids, labels and tensors of the media."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ....checks import NamedLikeTheirs, of_type
from ....config import build_config
from ....errors import ConfigError, DataError
from ....extras import need
from ....processors.base import Processor
from ....processors.media.facts import facts_of
from ....processors.media.image_header import eight_bits
from .names import LLAVA_ONEVISION, PROCESSORS, TRUST, EngineDatasetConfig, processor_of, with_media_keys

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


_ALL_FRAMES = 1e6  # frames per second, above any video: keep every frame given to process()


@dataclass
class ProcessorConfig:
    """The section processor_config of a dataset."""

    processor_name: str
    processor_type: str
    extra_kwargs: dict[str, Any] = field(default_factory=dict)


class DataProcessor(NamedLikeTheirs):
    """Our processor under LMMS Engine's name. build() reads its folder; before, its use raises ConfigError."""

    NOT_CALLED: ClassVar = dict.fromkeys(
        ("_build_processor", "_calculate_video_tokens", "_expand_encode_id_audio_tokens",
         "_expand_encode_id_image_tokens", "_expand_encode_id_video_tokens", "_expand_visual_tokens", "_process_t2i",
         "_process_t2t", "audio_processor", "audio_token_id", "chat_template_no_system", "get_qwen_template_labels",
         "get_video_template_labels", "image_token_id", "inject_time_instruction", "sampling_rate", "special_tokens",
         "video_token_id"),
        "make the tokens in process(images, hf_messages), and register the processor",
    )  # members of LMMS Engine's processors # fmt: skip
    CALLER: ClassVar = "process"
    dataset_type = "vision"

    def __init__(self, config: ProcessorConfig | Mapping[str, Any]):
        self.config = (
            config
            if isinstance(config, ProcessorConfig)
            else build_config(ProcessorConfig, with_media_keys(config) or {}, source="processor_config")
        )
        self._made: Processor | None = None

    def build(self) -> None:
        said = {name: value for name, value in vars(self.config).items() if value}
        of_type = PROCESSORS.get(self.config.processor_type)
        fps = (
            _ALL_FRAMES if of_type and of_type.kind != "image" and of_type.processor_class != LLAVA_ONEVISION else None
        )
        self._made = processor_of(EngineDatasetConfig(dataset_type=self.dataset_type, processor_config=said, fps=fps))

    @property
    def processor(self) -> Processor:
        if self._made is None:
            raise ConfigError(f"the {type(self).__name__} is not built: call build() before")
        return self._made

    @property
    def trusts(self) -> bool:
        """Whether Python files of the processor's folder may run."""
        return bool(of_type(f"extra_kwargs.{TRUST}", (self.config.extra_kwargs or {}).get(TRUST), "bool", None))

    @property
    def tokenizer(self) -> Any:
        """Load the folder's tokenizer of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.processor_name, trust_remote_code=self.trusts)

    def save_pretrained(self, path: str) -> None:
        """Write transformers' processor to a folder."""
        from transformers import AutoProcessor

        loaded = AutoProcessor.from_pretrained(self.config.processor_name, trust_remote_code=self.trusts)
        loaded.save_pretrained(path)

    def process(
        self,
        images: Sequence[Any] | None,
        hf_messages: Sequence[Mapping[str, Any]],
        audios: Sequence[NDArray[np.float32]] | None = None,
        sampling_rate: int | None = None,
        videos: Sequence[Any] | NDArray[Any] | None = None,
        system_message: str | None = None,
        *,
        fps: float = 2.0,
    ) -> dict[str, torch.Tensor]:
        """Return int64[T] input_ids and labels of a conversation, and tensors of its media in the form of batches.

        images: Pillow images. audios: [samples], with sampling_rate samples per second. videos: uint8[frames, 3, H, W]
        or uint8[frames, H, W, 3], at fps frames per second; all frames are read, for LLaVA-OneVision a fixed number.
        Each part of a medium's type takes the next medium of this type. The assistant's answers are trained on.
        """
        if audios is not None and sampling_rate is None:
            raise ConfigError("audios need sampling_rate: give how many samples a second they have")
        files = {
            "image": [_png(each) for each in images or ()],
            "audio": [_wav(each, int(sampling_rate or 0)) for each in audios or ()],
            "video": [_film(np.asarray(each), fps) for each in (() if videos is None else videos)],
        }
        try:
            messages = [dict(each) for each in hf_messages]
            if system_message is not None and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system_message})
            media = _store(messages, files)
        except DataError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"hf_messages are {str(hf_messages)[:80]!r} ({error!r}), expected [{{'role': …, 'content': …}}], a "
                "content being a text or parts {'type': …}: correct them"
            ) from error
        made = self.processor.process({"messages": json.dumps(messages), "media": media})
        of_media: Mapping[str, Any] = made.get("media") or {}
        return {name: torch.as_tensor(value) for name, value in ({**made, **of_media}).items() if name != "media"}


def _png(image: Any) -> bytes:
    data = io.BytesIO()
    if not hasattr(image, "convert"):
        raise DataError(f"an image is a {type(image).__name__}, expected Pillow's: give Image.open(…) or fromarray(…)")
    eight_bits(image).convert("RGB").save(data, "PNG")
    return data.getvalue()


def _wav(samples: NDArray[np.float32], rate: int) -> bytes:
    data, soundfile, waves = io.BytesIO(), need("soundfile", by="audios"), np.asarray(samples)
    if waves.dtype.kind != "f":
        raise DataError(
            f"a sound has samples of type {waves.dtype}, expected floats from -1 to 1: divide by full scale"
        )
    if waves.ndim not in (1, 2) or waves.shape[-1] > len(waves):
        raise DataError(f"a sound has the shape {[*waves.shape]}: give [samples], or [samples, channels]")
    soundfile.write(data, waves.astype(np.float32), rate, format="WAV", subtype="FLOAT")
    return data.getvalue()


def _film(frames: NDArray[np.uint8], fps: float) -> bytes:
    """Return the frames encoded without loss in a file."""
    if frames.ndim != 4 or 3 not in (frames.shape[1], frames.shape[3]):
        raise DataError(f"a video has the shape {[*frames.shape]}: give [frames, 3, height, width], a video each")
    if frames.dtype != np.uint8:
        lowest, highest = float(frames.min(initial=0)), float(frames.max(initial=0))
        if not -256 < lowest <= highest < 512:  # resized floats lie a little outside; NaN is neither
            raise DataError(f"a video has levels from {lowest:g} to {highest:g}, expected 0 to 255: scale them")
        frames = np.rint(frames).clip(0, 255).astype(np.uint8)
    if not 0.001 <= fps <= 1e6:
        raise DataError(f"a video has {fps!r} frames a second, expected 0.001 to 1000000: correct fps")
    shown = frames if frames.shape[3] == 3 else frames.transpose(0, 2, 3, 1)
    data, av = io.BytesIO(), need("av", by="videos")
    with av.open(data, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width, stream.pix_fmt = shown.shape[1], shown.shape[2], "bgr0"
        for frame in shown:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return data.getvalue()


def _store(messages: Sequence[dict[str, Any]], files: Mapping[str, list[bytes]]) -> bytes:
    """Return the bytes of all files; set the span of each file in its message part."""
    stored = b""
    for message in messages:
        if isinstance(message["content"], str) or (message["content"] is None and message.get("tool_calls")):
            continue
        message["content"] = parts = [dict(part) for part in message["content"]]
        for part in parts:
            kind = part["type"].removesuffix("_url")
            if kind == "text":
                continue
            if not files.get(kind):
                raise DataError(
                    f"a part of type {part['type']!r} has no {kind}: pass an entry of images, audios or videos for "
                    "each part, in the order of the parts"
                )
            data = files[kind].pop(0)
            part.clear()
            part |= {"type": kind, "span": [len(stored), len(data)], **facts_of(data, kind)._asdict()}
            stored += data
    for kind, left in files.items():
        if left:
            raise DataError(f"{len(left)} {kind}s are left over: name each by a part of type {kind}")
    return stored


Qwen2VLDataProcessor = Qwen2_5_VLDataProcessor = Qwen3_VLDataProcessor = DataProcessor
LLaVADataProcessor = LLaVAVideoDataProcessor = Qwen2DataProcessor = PureTextDataProcessor = DataProcessor
Qwen2_5OmniDataProcessor = Qwen3OmniMoeDataProcessor = BaseQwen2_5_DataProcessor = DataProcessor


class SitDataProcessor(DataProcessor):
    """DataProcessor for images with class numbers, for generation."""

    dataset_type = "sit"


class RaeSiglipDataProcessor(DataProcessor):
    """DataProcessor for images, for reconstruction."""

    dataset_type = "rae"


class BagelDataProcessor(DataProcessor):
    """DataProcessor for images to see and images to generate."""

    dataset_type = "bagel"
