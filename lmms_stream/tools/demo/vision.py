"""The vision demo: charts, videos and pictures of installed packages; a tiny processor and model of Qwen2.5-VL's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from ...versions.transformers import by_torchvision

PACKAGES = ("matplotlib", "sklearn", "skimage", "gradio", "bokeh")
ENDINGS = {".png", ".jpg", ".jpeg", ".webp"}
MOST_PICTURES = 60
MOST_BYTES = 2_000_000


def write_pictures(folder: Path) -> tuple[Path, int]:
    """A JSON-lines file of chats, the pictures that they name, copied beside it, and their number."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [path for name in PACKAGES for path in _pictures_of(name)][:MOST_PICTURES]
    if not found:
        raise DataError(
            f"none of {', '.join(PACKAGES)} has pictures on this machine: pip install matplotlib, which includes "
            "pictures"
        )
    rows = []
    for number, path in enumerate(found):
        name = f"{number:02}-{path.name}"
        shutil.copyfile(path, folder / name)
        words = path.stem.replace("_", " ").replace("-", " ")
        question = {"role": "user", "content": "What is this picture called?<image>"}
        rows.append({"messages": [question, {"role": "assistant", "content": words}], "images": [name]})
    listed = folder / "pictures.jsonl"
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return listed, len(rows)


def _pictures_of(package: str) -> list[Path]:
    """Its pictures, by path; none of a package that is not installed. It is not imported."""
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    paths = (path for folder in folders for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in ENDINGS)
    return [path for path in paths if "test" not in str(path) and path.stat().st_size <= MOST_BYTES]


# Bar charts whose numbers are the answers, drawn by matplotlib.

NAMES = ("ash", "elm", "fir", "oak")
HIGHEST = 9
_INCHES, _DOTS_PER_INCH = (2.24, 1.68), 100  # 224 x 168 pixels


def write_charts(folder: Path, *, num_charts: int, seed: int = 0) -> Path:
    """A JSON-lines file of chats and the PNG files that they name; every third chat compares two charts."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    values = rng.integers(1, HIGHEST + 1, (num_charts, len(NAMES)))
    draw_charts(folder, values)
    rows = [_question(number, values, rng) for number in range(num_charts)]
    path = folder / "charts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def draw_charts(folder: Path, values: NDArray[np.int64], *, dots_per_inch: int = _DOTS_PER_INCH) -> None:
    """A PNG file of each row of values, int64[num_charts, bars], by the names of chart_name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=dots_per_inch, layout="tight")
    axes = figure.subplots()
    bars = axes.bar(NAMES, [HIGHEST] * len(NAMES), color=["C0", "C1", "C2", "C3"])
    axes.set_ylim(0, HIGHEST + 1)
    axes.set_yticks(range(0, HIGHEST + 1, 3))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine("none")  # it stays as it is: making and laying out one takes longer than to draw it
    for number, heights in enumerate(values):
        for bar, height in zip(bars, heights, strict=True):
            bar.set_height(int(height))
        canvas.print_png(str(folder / chart_name(number)))


def chart_name(number: int) -> str:
    return f"chart-{number:05}.png"


def _question(number: int, values: NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
    bar = int(rng.integers(len(NAMES)))
    if number % 3 == 2:
        text = f"<image><image>Which of the two charts has the higher {NAMES[bar]}?"
        pair = [int(values[number - 1, bar]), int(values[number, bar])]
        answer = "Both are equal." if pair[0] == pair[1] else "The first." if pair[0] > pair[1] else "The second."
        answer += f" It is {pair[0]} in the first and {pair[1]} in the second."
        images = [chart_name(number - 1), chart_name(number)]
    else:
        text = f"<image>How much is {NAMES[bar]}, and which bar is the highest?"
        answer = f"{int(values[number, bar])}. The highest is {NAMES[int(values[number].argmax())]}."
        images = [chart_name(number)]
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images}


# Short videos of a disc that moves: which way it goes is the answer.

WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
WIDTH, HEIGHT, FRAMES_PER_S = 112, 84, 8
_RADIUS, _SPEED = 9, 3  # pixels; pixels a frame


def write_videos(folder: Path, *, num_videos: int, seed: int = 1) -> Path:
    """A JSON-lines file of chats and the MP4 files that they name, of one to three seconds.

    ConfigError where PyAV is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_videos):
        way = list(WAYS)[int(rng.integers(len(WAYS)))]
        name = f"video-{number:03}.mp4"
        _write(folder / name, _frames(way, num_frames=int(rng.integers(8, 25)), rng=rng))
        question = {"role": "user", "content": "<video>Which way does the disc go?"}
        rows.append({"messages": [question, {"role": "assistant", "content": f"It goes {way}."}], "videos": [name]})
    path = folder / "videos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _frames(way: str, *, num_frames: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """uint8[num_frames, HEIGHT, WIDTH, 3]: a disc on a plain ground, which comes in again where it goes out."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    ground, disc = rng.integers(0, 120, 3), rng.integers(150, 256, 3)
    start_x, start_y = int(rng.integers(WIDTH)), int(rng.integers(HEIGHT))
    step_x, step_y = WAYS[way]
    frames = np.empty((num_frames, HEIGHT, WIDTH, 3), np.uint8)
    for number in range(num_frames):
        from_x = (x - start_x - step_x * _SPEED * number + WIDTH // 2) % WIDTH - WIDTH // 2
        from_y = (y - start_y - step_y * _SPEED * number + HEIGHT // 2) % HEIGHT - HEIGHT // 2
        frames[number] = np.where((from_x**2 + from_y**2 < _RADIUS**2)[..., None], disc, ground)
    return frames


def _write(path: Path, frames: NDArray[np.uint8]) -> None:
    try:
        import av
    except ImportError as error:
        raise ConfigError("videos need PyAV: pip install 'lmms-stream[media]'") from error
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=FRAMES_PER_S)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


# The processor and the model, made without a download.

VOCABULARY = 1024
INITIALIZER_RANGE = 0.05  # transformers' 0.02 is for wide models: one of 64 hardly sees its images with it
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] if message['content'] is string else message['content'][0]['text'] }}"
    "<|im_end|>{% endgeneration %}\n"
    "{% else %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_processor(folder: Path, *, texts: Sequence[str]) -> Path:
    """A processor of the family's classes, its tokenizer trained on texts, as save_pretrained writes it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2_5_VLProcessor, Qwen2TokenizerFast
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.model.save(str(folder))
    tokenizer = Qwen2TokenizerFast(
        str(folder / "vocab.json"), str(folder / "merges.txt"), additional_special_tokens=list(SPECIAL[1:])
    )
    processor = Qwen2_5_VLProcessor(
        by_torchvision("Qwen2VLImageProcessor")(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(folder)
    return folder


def model_fields(processor: Path, *, positions: int, hidden_size: int = 64, num_layers: int = 2) -> dict[str, Any]:
    """The fields of a config for the processor in a folder. positions: tokens that a sequence may have."""
    tokenizer = json.loads((processor / "tokenizer.json").read_text(encoding="utf-8"))
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    heads = 4
    eighth = hidden_size // heads // 8
    text = {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": positions,
        "initializer_range": INITIALIZER_RANGE,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2 * eighth, eighth, eighth]},
    }
    tower = {
        "depth": 2,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_heads": heads,
        "out_hidden_size": hidden_size,
        "window_size": 112,
        "initializer_range": INITIALIZER_RANGE,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,  # as published models have it
    }
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": tower,
        "tie_word_embeddings": False,
        "image_token_id": added["<|image_pad|>"],
        "video_token_id": added["<|video_pad|>"],
        "vision_start_token_id": added["<|vision_start|>"],
        "vision_end_token_id": added["<|vision_end|>"],
    }
