"""Compare our media code of a model family with the processor of the installed transformers.

Both read a few generated images, videos and sounds. The result is cached on disk, so later processors of the same
folder do not load transformers.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..extras import need
from ..version import VERSION
from .base import code_and_packages, keep, read_kept
from .families.family import Family, Layout
from .families.files import ProcessorFiles
from .families.installed import Answer, AsInstalled, Installed
from .installed import PLURALS, ByInstalled, runs_of, version_name
from .media.facts import AudioFacts, facts_of
from .tokenizers import FastTokenizer

if TYPE_CHECKING:
    from .media.facts import VideoFacts

logger = logging.getLogger("lmms_stream")
_PACKAGES = ("transformers", "torch", "torchvision", "pillow", "av", "soundfile", "numpy")  # packages for reading media
_SIZES = ((37, 61), (9, 7), (40, 390), (700, 500))  # of images: odd, tiny, tall, and one of several tiles
_FILMS = ((60, 44, 7), (1280, 720, 4))  # width, height and frames of videos
_SECONDS = (0.3, 1.27)  # of sounds
# Largest and mean difference of normalized pixels. Rounding during the resize changes single values by up to ten of
# 255, but the mean by 0.003 at most; another resize filter changes the mean by 0.005 to 0.017.
_MOST, _MEAN = 16 / 255 / 0.26, 0.005
_MOST_OF_SOUND = 1e-4  # NumPy and torch differ by up to 6e-5
_COMPARE = (
    "import sys; sys.path[:] = {path!r}; import torch; from lmms_stream.processors import multimodal; "
    "multimodal.write_differences({of!r}, {to!r}, {trusts})"
)
_TIMEOUT_S = 600


class Differences(NamedTuple):
    """Kind of media -> difference of the results, and kind -> reason of a failed comparison.

    is_loaded: whether the installed processor could be loaded.
    """

    differences: Mapping[str, str]
    failures: Mapping[str, str]
    is_loaded: bool = True


def or_installed(
    family: Family, plain_of: Callable[[], Family], tokenizer: FastTokenizer, files: ProcessorFiles
) -> Family:
    """Return the family, or a ByInstalled if the installed processor's results differ.

    plain_of: makes the family without the user's settings, for the comparison.
    """
    asked: Any = family
    if isinstance(asked, AsInstalled):
        asked.installed.family = family
        reasons = dict.fromkeys(asked.kinds, "no other code reads them")
        return cast("Family", ByInstalled(family, asked.installed, tokenizer, reasons))
    if not hasattr(family, "of_installed"):
        return family
    name = family.description.get("family", type(family).__name__)
    plain = plain_of()
    found = _differences(plain, tokenizer, files)
    for kind, reason in found.failures.items():
        logger.log(
            logging.WARNING if found.is_loaded else logging.INFO,
            "%s of %s could not be compared with what the processor of %s makes (%s): they are read by lmms_stream",
            PLURALS.get(kind, kind), name, version_name(), reason,
        )  # fmt: skip
    for kind, difference in found.differences.items():
        logger.warning(
            "%s of %s: the processor of %s makes something else than lmms_stream %s (%s): they are read by it, "
            "which is slower",
            PLURALS[kind], name, version_name(), VERSION, difference,
        )  # fmt: skip
    if not found.differences:
        return family
    kinds = ("image", "video") if hasattr(family, "limits") else ()
    changed = {kind: family.limits(kind) for kind in kinds if family.limits(kind) != plain.limits(kind)}
    installed = Installed(files, family, limits=changed)
    return cast("Family", ByInstalled(family, installed, tokenizer, found.differences))


def _differences(family: Family, tokenizer: FastTokenizer, files: ProcessorFiles) -> Differences:
    """Return the kept result, or compare now: in this process if it has imported torch, else in another process."""
    described = {
        **code_and_packages(Path(__file__).parent, [type(family)], _PACKAGES),
        "family": dict(family.description),
        "folder": [files.processor_class, *map(dict, (files.image, files.video, files.sound, files.processor))],
    }
    kept = read_kept("processors", described)
    if isinstance(kept, dict):
        return Differences(differences=kept, failures={})
    if "torch" in sys.modules:
        found = compared(family, tokenizer, files)
    else:
        with TemporaryDirectory() as folder:
            written = Path(folder) / "found.json"
            program = _COMPARE.format(path=sys.path, of=files.name, to=str(written), trusts=files.trust_remote_code)
            try:
                subprocess.run([sys.executable, "-c", program], check=True, timeout=_TIMEOUT_S, capture_output=True)
                found = Differences(**json.loads(written.read_bytes()))
            except (subprocess.SubprocessError, OSError) as error:
                found = Differences(differences={}, failures={"media": str(error)}, is_loaded=False)
    if not found.failures:
        keep("processors", described, dict(found.differences))
    return found


def compared(family: Family, tokenizer: FastTokenizer, files: ProcessorFiles) -> Differences:
    """Compare the results of both for a few media of each kind of the family."""
    installed = Installed(files, family)
    try:
        installed.processor  # noqa: B018 - loads the processor
    except Exception as error:  # noqa: BLE001 - any error of a library
        return Differences(differences={}, failures={"media": _first_line(error)}, is_loaded=False)
    differences, failures = {}, {}
    for kind in family.placeholders:
        try:
            found = (_difference(case, family, tokenizer) for case in _CASES[kind](family, installed))
            if difference := next(filter(None, found), ""):
                differences[kind] = difference
        except (ImportError, ConfigError):
            continue  # a package is missing, and our code cannot read the media either
        except Exception as error:  # noqa: BLE001 - a later transformers may be asked in another way
            failures[kind] = _first_line(error)
    return Differences(differences=differences, failures=failures)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Stored media of one kind, their layouts in a sample, and the installed processor's answer."""

    name: str
    kind: str
    media: Sequence[bytes]
    layouts: Sequence[Layout]
    answer: Answer


def _images(family: Family, installed: Installed) -> Iterator[Case]:
    pictures = [_picture(*size, seed=seed) for seed, size in enumerate(_SIZES)]
    pictures.append(np.repeat(pictures[0].mean(axis=2, keepdims=True), 3, axis=2).astype(np.uint8))  # grey
    for images in (*([each] for each in pictures), pictures[:2]):
        media = [_png(each) for each in images]
        layouts = [family.layout("image", facts_of(data, "image")) for data in media]
        in_sample = getattr(family, "in_sample", list)
        sizes = " and ".join(f"{each.shape[1]} x {each.shape[0]} pixels" for each in images)
        yield Case(
            name=f"of {sizes}", kind="image", media=media, layouts=in_sample(layouts),
            answer=installed.of_images(images),
        )  # fmt: skip


def _videos(family: Family, installed: Installed) -> Iterator[Case]:
    from .media.video import read_frames

    for width, height, num_frames in _FILMS:
        data = _film(width, height, num_frames)
        facts = cast("VideoFacts", facts_of(data, "video"))
        layout = family.layout("video", facts)
        numbers = family.frames(layout)
        frames = read_frames(data, numbers, num_frames=facts.frames, width=width, height=height)
        yield Case(
            name=f"of {num_frames} frames of {width} x {height} pixels", kind="video", media=[data], layouts=[layout],
            answer=installed.of_video(frames, numbers, facts),
        )  # fmt: skip
        if layout.patches == family.layout("video", facts._replace(width=2 * width)).patches:
            return  # all sizes give the same patches


def _sounds(family: Family, installed: Installed) -> Iterator[Case]:
    rate: int = family.clips.rate  # type: ignore[attr-defined]
    for seed, seconds in enumerate(_SECONDS):
        samples = _tone(int(seconds * rate), rate, seed)
        layout = family.layout("audio", AudioFacts(len(samples), rate))
        yield Case(
            name=f"of {seconds} s", kind="audio", media=[_wav(samples, rate)], layouts=[layout],
            answer=installed.of_sound(samples.astype(np.float32) / np.float32(2**15), rate),
        )  # fmt: skip


_CASES: Mapping[str, Callable[[Family, Installed], Iterator[Case]]] = {
    "image": _images, "video": _videos, "audio": _sounds,
}  # fmt: skip


def _difference(case: Case, family: Family, tokenizer: FastTokenizer) -> str:
    """Return the difference of the two, or "" if they agree.

    Other texts around placeholders do not count: since 5.10 the texts of a Qwen3-VL video differ from its training.
    """
    counts = tuple(count for layout in case.layouts for count in layout.counts)
    _, theirs = runs_of(case.answer.ids, family, tokenizer)
    if counts != theirs:
        return f"one {case.name} becomes {list(theirs)} tokens, here {list(counts)}"
    for name, values in family.tensors(case.layouts, case.media).items():
        found = case.answer.tensors.get(name)
        if found is None:
            return f"one {case.name} has no {name}"
        if found.shape != values.shape:
            return f"{name} of one {case.name} is of shape {found.shape}, here {values.shape}"
        distance = np.abs(values.astype(np.float64) - found)
        most, mean = (_MOST_OF_SOUND,) * 2 if case.kind == "audio" else (_MOST, _MEAN)
        if values.dtype.kind != "f":
            most = mean = 0
        if distance.max() > most or distance.mean() > mean:
            return f"{name} of one {case.name} differs by up to {distance.max():.2g}"
    return ""


def _picture(width: int, height: int, *, seed: int) -> NDArray[np.uint8]:
    """Waves of colors with noise."""
    y, x = np.mgrid[0:height, 0:width]
    random = np.random.default_rng(seed)
    waves = [np.sin((x * a + y * b) / 40) for a, b in random.uniform(-1, 1, (3, 2))]
    pixels = 127 + 90 * np.stack(waves, -1) + random.normal(0, 8, (height, width, 3))
    return pixels.clip(0, 255).astype(np.uint8)


def _png(image: NDArray[np.uint8]) -> bytes:
    need("PIL", by="images")
    from PIL import Image

    written = BytesIO()
    Image.fromarray(image).save(written, "PNG", compress_level=1)
    return written.getvalue()


def _film(width: int, height: int, num_frames: int) -> bytes:
    import av

    written = BytesIO()
    with av.open(written, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(5))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for seed in range(num_frames):
            part = _picture(width // 4, height // 4, seed=seed)
            frame = av.VideoFrame.from_ndarray(np.tile(part, (4, 4, 1)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return written.getvalue()


def _tone(num_samples: int, rate: int, seed: int) -> NDArray[np.int16]:
    noise = np.random.default_rng(seed).normal(0, 0.02, num_samples)
    wave = 0.4 * np.sin(2 * np.pi * 440 * np.arange(num_samples) / rate) + noise
    return (wave * 2**15).astype(np.int16)


def _wav(samples: NDArray[np.int16], rate: int) -> bytes:
    import wave

    written = BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return written.getvalue()
