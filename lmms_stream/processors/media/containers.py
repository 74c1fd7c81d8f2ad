"""Containers of videos and sounds, opened by PyAV. bytes -> a stream; frames, average rates, samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from ...errors import ConfigError, DataError, LmmsStreamError
from .formats import media_format
from .types import AudioFacts, VideoFacts, check_samples

MAX_FRAME_PIXELS = 178_956_970  # of a video: Pillow's limit for an image, against decompression bombs
_MOST_SLANT = 100  # of a display matrix whose angle is rounded to 90 degrees
_DEMUXERS = {"mp4": "mov", "mov": "mov", "m4a": "mov", "webm": "matroska", "mkv": "matroska"}  # others: same name


@contextmanager
def opened(
    data: bytes, kind: Literal["video", "audio"], *, is_strict: bool = False, subject: str = "it"
) -> Iterator[tuple[Any, Any]]:
    """Open a container and its stream of a kind, to be decoded in one thread.

    is_strict: flaws found by the decoder are errors. PyAV's errors inside the context become a DataError. subject: name
    of the media in this error. ConfigError if PyAV is missing.
    """
    av = _library()
    name = media_format(data) or ""
    try:
        # Only the format of the first bytes: another demuxer (e.g. for playlists) might read files.
        with av.open(BytesIO(data), format=_DEMUXERS.get(name, name)) as container:
            stream = container.streams.best(kind)
            if stream is None or stream.codec_context is None:
                raise DataError(f"it has no {kind} in a known codec: remove it, or write it with another codec")
            if kind == "video":
                width, height = _shown(stream, stream)
                if max(stream.width, width) * height > MAX_FRAME_PIXELS:
                    raise DataError(
                        f"it has frames of {width} x {height} pixels, more than {MAX_FRAME_PIXELS}: make it smaller "
                        "before the conversion"
                    )
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            options = {"err_detect": "crccheck+explode"} if is_strict else {}
            if kind == "video":
                options["max_pixels"] = str(MAX_FRAME_PIXELS)  # also of frames that are larger than in the header
            stream.codec_context.options = options
            yield container, stream
    except LmmsStreamError:
        raise
    except (av.FFmpegError, ValueError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{subject} cannot be decoded ({reason}): repair or remove it") from error


def has_sound(data: bytes) -> bool:
    """Return whether a video has sound."""
    with opened(data, "video") as (container, _):
        return bool(container.streams.audio)


def _library() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            'videos and sounds are decoded by PyAV, which is missing: pip install "lmms-stream[media]"'
        ) from error
    return av


# Frames and rates of videos, and samples of sounds whose headers lack them.
#
# The headers of MP4, MOV and AVI list the frames. The list is used if decoding gives exactly these frames. Every other
# file is decoded once, in one thread, and no frame is kept.

_PACKET_IS_FRAME = {"mov": ("h264", "hevc", "mpeg4", "vp9", "av1", "mjpeg", "prores"), "avi": ("mpeg4", "mjpeg")}


def video_facts(data: bytes, *, is_checked: bool = False) -> VideoFacts:
    """Return the facts about a video. is_checked: decode all of it, without repairs.

    DataError for a video without frames, for undecodable data, and for frames that are too large.
    """
    with opened(data, "video") as (container, stream):
        listed = _listed_frames(data, container, stream)
        if listed is not None and not is_checked:
            first = next(container.decode(stream), None)
            if first is not None and not first.interlaced_frame:  # a packet may hold one field of two
                fps = listed.fps or _average_rate(_packet_times(data), container, stream)
                return VideoFacts(*_size_shown(first, stream), listed.num_frames, fps)
    found = _decoded_facts(data, is_checked=is_checked)
    if is_checked and listed is not None and listed.num_frames != found.frames:
        raise DataError(f"its header lists {listed.num_frames} frames, but it has {found.frames}: repair or remove it")
    return found


def _decoded_facts(data: bytes, *, is_checked: bool) -> VideoFacts:
    first: Any = None
    times: list[int | None] = []
    with opened(data, "video", is_strict=is_checked) as (container, stream):
        for frame in container.decode(stream):
            if is_checked and frame.is_corrupt:
                raise DataError(f"its frame {len(times)} is damaged: repair or remove it")
            first = first or frame
            times.append(frame.pts)
        if first is None:
            raise DataError("it has no frames: remove it")
        return VideoFacts(*_size_shown(first, stream), len(times), _average_rate(times, container, stream))


def sound_facts(data: bytes, *, is_checked: bool = False) -> AudioFacts:
    """Decode a whole sound; return its facts. DataError for no samples, several rates, and NaN."""
    samples, rates = 0, set()
    with opened(data, "audio", is_strict=is_checked) as (container, stream):
        for frame in container.decode(stream):
            samples += frame.samples
            rates.add(frame.sample_rate)
            if frame.format.name.startswith(("flt", "dbl")):
                check_samples(frame.to_ndarray())
    if len(rates) > 1:
        raise DataError(f"its sample rate changes ({', '.join(map(str, sorted(rates)))} Hz): resample or remove it")
    if not samples:
        raise DataError("it has no samples: remove it")
    return AudioFacts(samples, rates.pop())


def _size_shown(frame: Any, stream: Any) -> tuple[int, int]:
    """Width and height in square pixels, turned like the frame."""
    width, height = _shown(frame, stream)
    return (height, width) if Turn.of(frame).swaps_axes else (width, height)


def _shown(frame: Any, stream: Any) -> tuple[int, int]:
    """Width and height in square pixels."""
    return max(1, round(frame.width * (stream.sample_aspect_ratio or 1))), frame.height


class Turn(NamedTuple):
    """How a frame is turned to be shown: its axes are swapped first, then rows or columns are put in reverse order."""

    swaps_axes: bool = False
    reverses_rows: bool = False
    reverses_columns: bool = False

    @classmethod
    def of(cls, frame: Any) -> Turn:
        """Read the turn in the frame's display matrix (ISO 14496-12, 6.2.2): x' = a x + c y, y' = b x + d y.

        Frames at other angles than multiples of 90 degrees are not turned.
        """
        matrix = frame.side_data.get("DISPLAYMATRIX")
        if matrix is None:
            return cls()
        a, b, _, c, d, *_ = memoryview(bytes(matrix)).cast("i")
        if max(abs(b), abs(c)) * _MOST_SLANT < min(abs(a), abs(d)):
            return cls(False, d < 0, a < 0)
        if max(abs(a), abs(d)) * _MOST_SLANT < min(abs(b), abs(c)):
            return cls(True, b < 0, c < 0)
        return cls()


class _Listed(NamedTuple):
    """Frames listed in a header. fps: None for frames of different durations."""

    num_frames: int
    fps: float | None


def _listed_frames(data: bytes, container: Any, stream: Any) -> _Listed | None:
    """Return the frames in the header's list, if decoding gives exactly these; None if this is uncertain."""
    codec, entries = stream.codec_context.name, list(stream.index_entries)
    container_name = container.format.name.partition(",")[0]
    if codec not in _PACKET_IS_FRAME.get(container_name, ()) or not entries or len(entries) != stream.frames:
        return None
    num_missing = sum(entry.pos + entry.size > len(data) for entry in entries)
    if num_missing:
        raise DataError(
            f"it is cut short: of its {len(entries)} frames, {num_missing} are after its end: repair or remove it"
        )
    if any(entry.is_discard or not entry.size for entry in entries) or not _decodes_from(data, entries[0], stream):
        return None
    lengths = {after.timestamp - before.timestamp for before, after in pairwise(entries)}
    if len(lengths) > 1 or min(lengths, default=1) < 1:
        return _Listed(len(entries), None)
    rate = 1 / (lengths.pop() * stream.time_base) if lengths else stream.average_rate
    return _Listed(len(entries), float(rate) if rate else None)


def _decodes_from(data: bytes, entry: Any, stream: Any) -> bool:
    """Return whether no later packet depends on data before the first packet, so that all frames can be decoded."""
    codec = stream.codec_context.name
    if codec == "mpeg4" and stream.codec_context.has_b_frames:
        return False
    if codec in ("h264", "hevc"):
        return _first_slice_is_idr(data[entry.pos : entry.pos + entry.size], stream.codec_context)
    return bool(entry.is_keyframe)


def _first_slice_is_idr(packet: bytes, context: Any) -> bool:
    """Return whether the first slice of a packet is an IDR picture. NAL units are stored after their lengths (ISO
    14496-15, 5.3 and 8.3; types: ITU-T H.264, 7.4.1, and H.265, 7.4.2.2).
    """
    extradata, is_h264 = context.extradata or b"", context.name == "h264"
    length_at = 4 if is_h264 else 21
    if len(extradata) <= length_at:
        return False
    num_length_bytes, offset = (extradata[length_at] & 3) + 1, 0
    while offset + num_length_bytes < len(packet):
        size = int.from_bytes(packet[offset : offset + num_length_bytes], "big")
        header = packet[offset + num_length_bytes]
        kind, num_slice_kinds = (header & 31, 6) if is_h264 else (header >> 1 & 63, 32)
        if kind in range(1 if is_h264 else 0, num_slice_kinds):
            return kind == 5 if is_h264 else kind in (19, 20)
        offset += num_length_bytes + size
    return False


def _packet_times(data: bytes) -> list[int | None]:
    """Presentation time of each packet of a video, in units of its time base; nothing is decoded."""
    with opened(data, "video") as (container, stream):
        return [packet.pts for packet in container.demux(stream) if packet.size]


def _average_rate(times: Sequence[int | None], container: Any, stream: Any) -> float:
    """Frames a second, from the times of frames; the header's number if it agrees with the times."""
    said = stream.average_rate or stream.guessed_rate
    if container.format.name == "avi" and said and stream.frames:  # AVI has frames of one length, and no times
        return float(said * len(times) / stream.frames)
    known = sorted(time for time in times if time is not None)
    if len(known) < 2 or known[0] == known[-1]:
        return float(said or 1)
    tick = float(stream.time_base)
    if said and all(abs((t - known[0]) * tick - n / float(said)) <= 1.001 * tick for n, t in enumerate(known)):
        return float(said)
    return (len(known) - 1) / ((known[-1] - known[0]) * tick)
