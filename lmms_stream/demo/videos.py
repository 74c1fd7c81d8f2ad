"""Short videos of a disc that moves: which way it goes is the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

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
