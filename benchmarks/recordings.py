"""Chats about recordings, as files and as MDS shards. kind, number -> chat -> [dataset].

Kinds: "sound" (a FLAC, of 16 or 44.1 kHz and 3 to 30 seconds), "video" (an MP4 of 5 seconds and 360 lines, with sound
that is not read) and "omni" (the same videos, with their sound). All are made here: sounds are noise and tones that
rise and fall as speech does, videos a window that moves over the photograph that matplotlib ships.
"""

from __future__ import annotations

import json
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from media import photograph, write_frames
from numpy.typing import NDArray
from sound_learning import save_processor as save_sound_processor
from sound_learning import save_tokenizer

KINDS = ("sound", "video", "omni")
PART_TYPES = {"sound": "audio", "video": "video", "omni": "video"}
SUFFIXES = {"audio": "flac", "video": "mp4"}
SETTINGS: dict[str, dict[str, Any]] = {  # of our processor
    "sound": {},
    "video": {"frame_num": 16},
    "omni": {"frame_num": 16, "use_audio_in_video": True},
}
NUM_FRAMES, RATE, SIZE = 150, 30, (640, 360)
NUM_CHOSEN = 16  # frames that are read
NUM_BINS, SECONDS = 128, {"sound": 30, "omni": 300}  # of the released processors
RATES, LENGTHS_S, FILM_RATE = (16000, 44100), (3.0, 30.0), 48000
NUM_DISTINCT = 24  # recordings; further chats have them again
ANSWER = "A voice that rises and falls, and some noise behind it."
VOCABULARY = 1024
_OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_OMNI_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'video' %}"
    "<|vision_bos|><|VIDEO|><|vision_eos|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)


def question(number: int) -> str:
    return f"Recording number {number:06d} of the series: what is heard there?"


def chat(number: int, medium: Any) -> list[dict[str, Any]]:
    """Messages of transformers' templates, with a part for the recording."""
    content = [medium, {"type": "text", "text": question(number)}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]


def voice(seconds: float, rate: int, number: int) -> NDArray[np.float32]:
    """Tones that rise and fall, with noise."""
    rng = np.random.default_rng(number)
    time_s = np.arange(int(seconds * rate)) / rate
    pitch = 2 * np.pi * np.cumsum(140 + 40 * np.sin(2 * np.pi * time_s * rng.uniform(0.5, 2))) / rate
    wave = sum(0.3 / order * np.sin(order * pitch) for order in range(1, 6))
    made: NDArray[np.float32] = (wave * (1 + np.sin(9 * time_s)) / 2 + rng.normal(0, 0.01, len(time_s))).astype("f4")
    return made


@cache
def medium(kind: str, number: int) -> bytes:
    """The file of recording `number` of NUM_DISTINCT."""
    if PART_TYPES[kind] == "video":
        return film(number)
    import soundfile

    buffer, rate = BytesIO(), RATES[number % len(RATES)]
    seconds = np.random.default_rng([number, 1]).uniform(*LENGTHS_S)
    soundfile.write(buffer, 0.5 * voice(seconds, rate, number), rate, format="FLAC")
    return buffer.getvalue()


@cache
def film(number: int) -> bytes:
    """A window that moves over the photograph, with a voice."""
    import av

    pixels, buffer = np.roll(np.asarray(photograph()), 31 * number, axis=1), BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        options = {"g": str(RATE), "bf": "3", "crf": "26", "preset": "veryfast"}
        stream: Any = output.add_stream("libx264", rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        sounds: Any = output.add_stream("aac", rate=FILM_RATE, layout="mono")
        write_frames(output, stream, pixels, NUM_FRAMES)
        wave = voice(NUM_FRAMES / RATE, FILM_RATE, number)
        for start in range(0, len(wave), 1024):
            heard = av.AudioFrame.from_ndarray(wave[None, start : start + 1024], format="fltp", layout="mono")
            heard.sample_rate, heard.pts = FILM_RATE, start
            output.mux(sounds.encode(heard))
        output.mux(sounds.encode(None))
    return buffer.getvalue()


def write_files(folder: Path, kind: str, count: int) -> Path:
    """A recording for each chat, and the chats as JSON lines that name them."""
    folder.mkdir(parents=True)
    part_type = PART_TYPES[kind]
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            path = path_of(folder, kind, number)
            path.write_bytes(medium(kind, number % NUM_DISTINCT))
            asked = {"role": "user", "content": f"<{part_type}>{question(number)}"}
            messages = [asked, {"role": "assistant", "content": ANSWER}]
            file.write(json.dumps({"messages": messages, f"{part_type}s": [path.name]}) + "\n")
    return folder / "chats.jsonl"


def path_of(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{number:06d}.{SUFFIXES[PART_TYPES[kind]]}"


def save_processor(folder: Path, kind: str) -> Path:
    """A processor of Qwen2-Audio's, Qwen2.5-VL's or Qwen2.5-Omni's, its settings of media those of the released."""
    texts = [ANSWER] * 8  # digits are tokens of their own, because no text that it is trained on has any
    if kind == "sound":
        return save_sound_processor(folder, texts, num_bins=NUM_BINS, seconds=SECONDS[kind], vocabulary=VOCABULARY)
    if kind == "video":
        from lmms_stream.tools.demo.vision import save_processor as save_vision_processor

        return save_vision_processor(folder, texts=texts)
    return _save_omni_processor(folder, texts)


def _save_omni_processor(folder: Path, texts: list[str]) -> Path:
    from transformers import Qwen2_5OmniProcessor, Qwen2VLImageProcessor, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    tokens = ("<|im_start|>", "<|im_end|>", *_OMNI_TOKENS.values())
    tokenizer = save_tokenizer(
        folder, texts, tokens=tokens, vocabulary=VOCABULARY, extra_special_tokens=dict(_OMNI_TOKENS)
    )
    images, videos = Qwen2VLImageProcessor(), Qwen2VLVideoProcessor()
    sounds = WhisperFeatureExtractor(feature_size=NUM_BINS, chunk_length=SECONDS["omni"])
    Qwen2_5OmniProcessor(images, videos, sounds, tokenizer, chat_template=_OMNI_TEMPLATE).save_pretrained(folder)
    # The released folders hold the settings of images and sounds in one file; save_pretrained writes the last alone.
    both = {**images.to_dict(), **sounds.to_dict(), "processor_class": "Qwen2_5OmniProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    return folder
