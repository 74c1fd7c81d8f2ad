"""Claims: from the bytes of a JPEG of 1 megapixel to pixel_values takes at most half of the time of transformers' image
processors; 16 of 150 frames of a video take at most 70 % of the time of decoding all and picking them.

1. A photograph, as large as the model takes it and at half of its width and height. Ours decodes the whole of it, and,
   for the half, also at a fraction of its size. Beside it Pillow decodes, and Qwen2VLImageProcessor or its fast sibling
   does the rest. Without a fraction our values are compared with the slow one's, bit for bit.
2. A video of 360 lines with key frames every second: the same frames, bit for bit, by decoding all of it with PyAV.

All take turns in one process on one core, with one thread; counted is CPU time, the median of the rounds.

    python benchmarks/media.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from lmms_stream.processors.media.images import decode_image
from lmms_stream.processors.media.patches import to_patches
from lmms_stream.processors.media.resize import resize
from lmms_stream.processors.media.video import read_frames
from measure import keep_to_one_core, print_table, verdict
from numpy.typing import NDArray

MAX_OF_TRANSFORMERS, MAX_OF_ALL_FRAMES = 0.5, 0.7
SIDE = 1000  # pixels of the photograph
NUM_FRAMES, NUM_CHOSEN, FRAME_SIZE, RATE = 150, 16, (640, 360), 30
MIN_PIXELS = 56 * 56
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def photograph() -> Any:
    """The photograph that matplotlib ships, enlarged."""
    import matplotlib
    from PIL import Image

    image = Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def write_frames(output: Any, stream: Any, pixels: NDArray[np.uint8], num_frames: int) -> None:
    """Encode the frames of a window of the stream's size that moves over pixels, uint8[H, W, 3]."""
    import av

    for number in range(num_frames):
        window = pixels[2 * number : 2 * number + stream.height, number : number + stream.width]
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(window), format="rgb24")
        frame.pts = number
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def video_bytes() -> bytes:
    """A window that moves over the photograph."""
    import av

    pixels, buffer = np.asarray(photograph()), BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=RATE, options={"g": str(RATE), "bf": "3", "crf": "26"})
        stream.width, stream.height, stream.pix_fmt = *FRAME_SIZE, "yuv420p"
        write_frames(output, stream, pixels, NUM_FRAMES)
    return buffer.getvalue()


def pixel_values(data: bytes, *, max_pixels: int, with_fraction: bool) -> NDArray[np.float32]:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = smart_resize(SIDE, SIDE, 28, MIN_PIXELS, max_pixels)
    image = decode_image(data, min_width=width * with_fraction, min_height=height * with_fraction)
    frames = resize(image, width=width, height=height)[None]
    return to_patches(frames, patch_size=14, merge_size=2, temporal_patch_size=2, mean=MEAN, std=STD)


def by_transformers(processor: Any, data: bytes, *, max_pixels: int) -> NDArray[np.float32]:
    from PIL import Image

    options = {"min_pixels": MIN_PIXELS, "max_pixels": max_pixels, "return_tensors": "pt"}
    return np.asarray(processor(Image.open(BytesIO(data)).convert("RGB"), **options)["pixel_values"])


def all_frames(data: bytes) -> list[NDArray[np.uint8]]:
    import av

    with av.open(BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        return [frame.to_ndarray(format="rgb24", threads=1) for frame in container.decode(stream)]


def picked(frames: list[NDArray[np.uint8]], indices: list[int]) -> NDArray[np.uint8]:
    return np.stack([frames[index] for index in indices])


def cpu_seconds(ways: Mapping[str, Callable[[], Any]], *, rounds: int) -> dict[str, float]:
    """The median of each way's CPU time; a first round, in which loops are compiled, is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(measured[1:]) for name, measured in seconds.items()}


def measure_images(rounds: int) -> list[bool]:
    import torch
    from lmms_stream.versions.transformers import by_torchvision

    sys.path.append(str(Path(__file__).parents[1]))
    from tests.versions import by_pillow

    torch.set_num_threads(1)
    name = "Qwen2VLImageProcessor"
    buffer, slow, fast = BytesIO(), by_pillow(name)(), by_torchvision(name)()
    photograph().save(buffer, "JPEG", quality=90)
    data = buffer.getvalue()
    met, rows = [], []
    for name, max_pixels in (("whole", 1280 * 28 * 28), ("half", (SIDE // 2) ** 2)):
        ways = {
            "ours": partial(pixel_values, data, max_pixels=max_pixels, with_fraction=False),
            "ours, decoded at a fraction": partial(pixel_values, data, max_pixels=max_pixels, with_fraction=True),
            "Pillow, slow processor": partial(by_transformers, slow, data, max_pixels=max_pixels),
            "Pillow, fast processor": partial(by_transformers, fast, data, max_pixels=max_pixels),
        }
        seconds = cpu_seconds(ways, rounds=rounds)
        best = min(seconds["Pillow, slow processor"], seconds["Pillow, fast processor"])
        rows += [[f"{name}: {way}", f"{taken * 1e3:.1f}", f"{taken / best:.2f}"] for way, taken in seconds.items()]
        met += [seconds["ours"] <= MAX_OF_TRANSFORMERS * best]
        met += [np.array_equal(ways["ours"](), ways["Pillow, slow processor"]())]
    print_table(f"A JPEG of {SIDE} x {SIDE} to pixel_values", ["way", "ms", "of the better of transformers'"], rows)
    return met


def measure_video(rounds: int) -> list[bool]:
    data = video_bytes()
    indices = np.linspace(0, NUM_FRAMES - 1, NUM_CHOSEN).round().astype(int).tolist()
    size = {"width": FRAME_SIZE[0], "height": FRAME_SIZE[1]}
    ways: dict[str, Callable[[], Any]] = {
        f"{NUM_CHOSEN} frames": lambda: read_frames(data, indices, num_frames=NUM_FRAMES, **size),
        "all frames, then picked": lambda: picked(all_frames(data), indices),
    }
    seconds = cpu_seconds(ways, rounds=rounds)
    ours, theirs = seconds.values()
    rows = [[way, f"{taken * 1e3:.1f}", f"{taken / theirs:.2f}"] for way, taken in seconds.items()]
    print_table(f"{NUM_CHOSEN} of {NUM_FRAMES} frames of {FRAME_SIZE[1]} lines", ["way", "ms", "ratio"], rows)
    return [ours <= MAX_OF_ALL_FRAMES * theirs, np.array_equal(*(way() for way in ways.values()))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    keep_to_one_core()

    whole, whole_equal, half, half_equal = measure_images(args.rounds)
    print(f"at most {MAX_OF_TRANSFORMERS} of transformers' time: {verdict(whole and half)}")
    print(f"the bits of transformers' slow processor: {verdict(whole_equal and half_equal)}")
    fewer, frames_equal = measure_video(args.rounds)
    print(f"at most {MAX_OF_ALL_FRAMES} of the time of decoding all frames: {verdict(fewer)}")
    print(f"the bits of the frames decoded one after another: {verdict(frames_equal)}")


if __name__ == "__main__":
    main()
