"""Bytes of a video -> chosen frames, turned, and resized to one size.

Frames are numbered in the order of a full decode. Packets are read first, without decoding: sorted by presentation
times, they number the frames. Then only the groups of pictures with chosen frames are decoded, without frames that are
neither chosen nor reference frames. If packets do not determine the numbers (AVI with B frames has no times; some
frames are never shown), all frames up to the last chosen frame are decoded and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .containers import opened
from .formats import mime_type
from .pixels import Filter, resize

_CODECS_THAT_SKIP = ("h264", "mpeg4", "mpeg2video")  # reliable marks of non-reference frames (not HEVC's)
_TIMED_CONTAINERS = ("mov", "matroska")  # with presentation times in their packets
_CODECS_IN_ORDER = ("mjpeg", "mpeg4")  # for other codecs FFmpeg cannot reliably detect reordered frames


def read_frames(
    data: bytes, indices: Sequence[int], *, num_frames: int, width: int, height: int, filter: Filter = "bicubic"
) -> NDArray[np.uint8]:
    """Read the frames of the numbers `indices`, from 0, turned, then resized: RGB [len(indices), height, width, 3].

    num_frames: of the whole video, by its facts. filter: see resize. indices may come in any order, and more than once.
    DataError for a number outside of the video, and for a video that cannot be decoded.
    """
    wrong = [index for index in indices if not 0 <= index < num_frames]
    if wrong:
        raise DataError(f"the video has {num_frames} frames, and has no frame {wrong[0]}: choose from 0 to one less")
    out = np.empty((len(indices), height, width, 3), np.uint8)
    wanted: dict[int, list[int]] = {}
    for row, index in enumerate(indices):
        wanted.setdefault(index, []).append(row)
    missing = set(wanted)
    for number, frame in _frames(data, sorted(wanted), num_frames):
        if number in missing:
            missing.remove(number)
            out[wanted[number]] = resize(_as_shown(frame), width=width, height=height, filter=filter)
    if missing:
        raise DataError(
            f"the video has {num_frames} frames by its facts, and decoding gives no frame {min(missing)}: it is cut "
            "short, or its facts are wrong: repair it and convert the dataset again"
        )
    return out


def _frames(data: bytes, numbers: Sequence[int], num_frames: int) -> Iterator[tuple[int, Any]]:
    """Yield frames with their numbers; if packets do not find all of `numbers`, yield the frames from the first on."""
    left = set(numbers)
    with _opened(data) as (container, stream):
        packets = [_Packet.of(packet) for packet in container.demux(stream) if packet.size]
        order = _shown_order(packets, num_frames, container.format.name, stream.codec_context)
    if order is not None:
        times = {packets[order[number]].time: number for number in numbers}
        for frame in _decoded_ranges(data, _ranges(packets, [order[number] for number in numbers])):
            number = times.get(frame.pts)
            if number in left and not frame.is_corrupt:
                left.remove(number)
                yield number, frame
    if left:
        with _opened(data) as (container, stream):
            for number, frame in enumerate(container.decode(stream)):
                yield number, frame
                if number >= numbers[-1]:
                    return


class _Packet(NamedTuple):
    time: int | None  # presentation time
    is_key: bool
    is_shown: bool

    @classmethod
    def of(cls, packet: Any) -> _Packet:
        return cls(packet.pts, packet.is_keyframe, not packet.is_discard)


def _shown_order(packets: Sequence[_Packet], num_frames: int, form: str, codec: Any) -> list[int] | None:
    """Return the packets of frames 0, 1, … as numbers in the order of decoding; None if packets do not determine it.

    The order is known if the number of shown packets equals the number of frames, each at a different time. AVI, Ogg
    and some Matroska files have no times. FFmpeg's substitutes are wrong for reordered frames: they ascend in the order
    of decoding.
    """
    times = [packet.time for packet in packets]
    shown = [n for n, packet in enumerate(packets) if packet.is_shown]
    has_times = form.startswith(_TIMED_CONTAINERS) or codec.name in _CODECS_IN_ORDER
    if not has_times or None in times or len(set(times)) < len(times) or len(shown) != num_frames:
        return None
    order = sorted(shown, key=lambda n: packets[n].time or 0)
    return None if codec.has_b_frames and order == shown else order


def _ranges(packets: Sequence[_Packet], chosen: Sequence[int]) -> list[tuple[int, int, set[int]]]:
    """Packets to decode, [start, stop) in the order of decoding, from a key frame to the last chosen packet.

    With each range come its chosen packets. A range begins with the last key frame that is decoded and shown before its
    packet: frames of an open group, decoded after a key frame and shown before it, may refer to frames before the key
    frame.
    """
    ranges: list[tuple[int, int, set[int]]] = []
    for number in sorted(chosen):
        time = packets[number].time or 0
        start = next((n for n in range(number, -1, -1) if packets[n].is_key and (packets[n].time or 0) <= time), 0)
        together = {number}
        while ranges and start < ranges[-1][1]:
            first, _, others = ranges.pop()
            start, together = min(start, first), together | others
        ranges.append((start, number + 1, together))
    return ranges


def _decoded_ranges(data: bytes, ranges: Sequence[tuple[int, int, set[int]]]) -> Iterator[Any]:
    """Yield the frames of ranges of packets; frames without references to them are decoded only if they are chosen.

    Ends early if a range cannot be decoded by itself: the caller then decodes the video from its first frame on.
    """
    with suppress(DataError), _opened(data) as (container, stream):
        context = stream.codec_context
        others = "NONREF" if context.name in _CODECS_THAT_SKIP else "DEFAULT"
        numbered = enumerate(packet for packet in container.demux(stream) if packet.size)
        for start, stop, chosen in ranges:
            for number, packet in numbered:
                if number >= start:
                    context.skip_frame = "DEFAULT" if number in chosen else others
                    yield from context.decode(packet)
                if number == stop - 1:
                    break
            context.skip_frame = "DEFAULT"
            yield from context.decode(None)
            context.flush_buffers()


def _opened(data: bytes) -> AbstractContextManager[tuple[Any, Any]]:
    """Open the container and its video stream; DataError if the data is not a video."""
    mime_type(data, "video")
    return opened(data, "video", subject="the video")


def _as_shown(frame: Any) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24", threads=1)
    turns, rest = divmod(frame.rotation, 90)  # counterclockwise
    return pixels if rest else np.rot90(pixels, turns)
