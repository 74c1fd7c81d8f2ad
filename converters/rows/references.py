"""References to media in a row -> bytes: files below the media root, bytes of a column, base64.

Nothing is fetched from the web, and no reference leads out of the root.
"""

from __future__ import annotations

import base64
import binascii
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from ...errors import DataError, LmmsStreamError, ObjectMissingError
from ...processors.media.facts import SOUND_OF_VIDEO, Facts, VideoFacts, checked_facts, facts_of, sound_to_store
from ...processors.media.formats import Kind, looks_like_base64, mime_type
from ...processors.media.formats import usual_kind as usual_kind
from ...processors.media.image_header import fit_image, has_more_frames
from ...processors.media.types import INTERVAL_KEYS, interval_of
from ...storage.storage import shared_storage

MAX_MEDIA_BYTES = 1 << 31  # of a file and of a sample, the limit of a shard
CheckMedia = Literal["header", "decode"]
FACTS_OF_SOME = SOUND_OF_VIDEO  # facts of only some media of a kind
MORE_FRAMES = "<frames after the first>"  # recorded in `unread` for an image with several frames
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class SampleMedia:
    """Media of one sample, in the order of `add`; `data` is the stored bytes of all media.

    root: folder or URL that references start from; None if the source has none. max_image_pixels: larger images are
    reduced; other images stay byte for byte. check: "header" reads the header of each medium (and other parts for the
    facts), "decode" all of it to find broken media.
    """

    def __init__(self, root: str | None, *, max_image_pixels: int | None = None, check: CheckMedia = "header"):
        self._root = root
        self._max_image_pixels = max_image_pixels
        self._check = check
        self.unread: set[str] = set()  # parts of the media that nothing reads
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def data(self) -> bytes:
        return b"".join(self._pieces)

    def add(self, kind: str, reference: Any, *, said: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Add the medium of a reference; return its stored part: {"type", "mime", "span": [offset, size], facts}.

        said: mappings with other settings of the medium, of which the last counts: the seconds of a video, in LMMS
        Engine's form {"url", "video_start", "video_end"}, are stored, too.

        DataError, with the reference, for a reference outside of the root, and for media that are missing, unreadable,
        empty, too large, broken or of another kind.
        """
        if kind == "video" and isinstance(reference, (list, tuple)):
            raise DataError(
                f"a video is given as a list of {len(reference)} frames, but videos are stored as files: write the "
                "frames as a video file, or as separate images"
            )
        data = self.read(reference)
        if kind == "image" and has_more_frames(data):
            self.unread.add(MORE_FRAMES)
        known: Kind = "image" if kind == "image" else "audio" if kind == "audio" else "video"
        try:
            mime = mime_type(data, known)
            facts: Facts | None = None
            if kind == "image":
                data, facts = fit_image(data, max_pixels=self._max_image_pixels)
            if facts is None or self._check == "decode":
                facts = (checked_facts if self._check == "decode" else facts_of)(data, known)
            is_video = isinstance(facts, VideoFacts)
            seconds = [(name, each[name]) for each in said for name in INTERVAL_KEYS if is_video and name in each]
            interval = {name: value for name, value in seconds if value is not None}
            if isinstance(facts, VideoFacts) and (read := interval_of(interval)) is not None:
                read.frames(facts)  # DataError for an interval without frames
        except DataError as error:
            raise DataError(f"{kind} {shown(reference)}: {error}") from error
        sound = sound_to_store(data) if kind == "video" else {}
        offset = self._size
        self._pieces.append(data)
        self._size += len(data)
        if self._size > MAX_MEDIA_BYTES:
            raise DataError(f"the sample's media have more than {MAX_MEDIA_BYTES} bytes: split the sample")
        return {"type": kind, "mime": mime, "span": [offset, len(data)], **facts._asdict(), **sound, **interval}

    def read(self, reference: Any) -> bytes:
        """Return the bytes of a reference, of any kind; DataError for the reasons of `add`."""
        if isinstance(reference, Mapping):  # {"bytes", "path"}, the form in datasets of the hub
            inner = reference.get("path") if reference.get("bytes") is None else reference["bytes"]
            if inner is not None:
                return self.read(inner)
        if isinstance(reference, (bytes, bytearray, memoryview)):
            return _checked(bytes(reference), reference)
        if not isinstance(reference, str) or not reference:
            raise DataError(
                f"media {shown(reference)} must be a path, bytes, base64, or an object with one of them: correct it"
            )
        if reference.startswith("data:"):
            header, comma, encoded = reference.partition(",")
            if not comma or not header.endswith(";base64"):
                raise DataError(f"media {shown(reference)}: expected data:MIME;base64,… : write it in this form")
            return _decode(encoded, reference)
        if looks_like_base64(reference):
            return _decode(reference, reference)
        return _read_file(reference, self._root)


class NoMedia(SampleMedia):
    """Takes any reference, and reads nothing."""

    num_added = 0

    def add(self, kind: str, reference: Any, *, said: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        self.num_added += 1
        return {"type": kind, "mime": f"{kind}/x", "span": [0, 0], "width": 1, "height": 1}


def is_data(reference: Any) -> bool:
    """Return whether a reference holds the media, not a path."""
    if isinstance(reference, Mapping):
        return reference.get("bytes") is not None
    return not isinstance(reference, str) or reference.startswith("data:") or looks_like_base64(reference)


def shown(reference: Any) -> str:
    """Return a reference for messages: the size of bytes, and the beginning of a long text."""
    if isinstance(reference, (bytes, bytearray, memoryview)):
        return f"of {len(reference)} bytes"
    if isinstance(reference, Mapping):
        inner = reference.get("path") or reference.get("bytes")
        return shown(inner) if inner else f"with {', '.join(map(str, reference)) or 'nothing'}"
    text = repr(reference)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"


def _decode(encoded: str, reference: str) -> bytes:
    if len(encoded) // 4 * 3 > MAX_MEDIA_BYTES + 2:
        raise DataError(_too_large(reference))
    try:
        data = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"media {shown(reference)} is not valid base64 ({error}): encode it again") from error
    return _checked(data, reference)


def _checked(data: bytes, reference: Any) -> bytes:
    if not data:
        raise DataError(f"media {shown(reference)} is empty: repair or remove it")
    if len(data) > MAX_MEDIA_BYTES:
        raise DataError(_too_large(reference))
    return data


def _too_large(reference: Any) -> str:
    return f"media {shown(reference)} has more than {MAX_MEDIA_BYTES} bytes, which a shard cannot hold: split it"


def _read_file(reference: str, root: str | None) -> bytes:
    """Return the file of a path or URL below the root."""
    scheme = _URL.match(reference)
    if scheme and scheme[0].lower() in ("http://", "https://"):
        raise DataError(
            f"media {shown(reference)} is on the web, and conversions do not download media: download it first"
        )
    if scheme and scheme[0].lower() == "file://":
        return _read_file(unquote(urlsplit(reference).path), root)
    if root is None:
        raise DataError(f"media {shown(reference)} is a path, and the source has no folder: pass --media-root")
    if _URL.match(root):
        return _read_object(reference, root.rstrip("/"))
    if scheme:
        raise _outside(reference, root)
    try:
        base = Path(root).resolve(strict=True)
        path = (base / reference).resolve()
        if not path.is_relative_to(base):
            raise _outside(reference, root)
        return _load(path, reference)
    except LmmsStreamError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: null bytes; RuntimeError: links in a circle
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        what = "is missing" if missing else f"cannot be read ({error})"
        near = next((folder for folder in _folders_near(Path(root)) if missing and (folder / reference).is_file()), "")
        raise DataError(
            f"media {shown(reference)} {what} below the media root {root}: put it there, or pass --media-root"
            f"{near and f' {quote(str(near))}, where it is'}"
        ) from error


@lru_cache(maxsize=4)
def _folders_near(root: Path) -> list[Path]:
    """Return the folders in, next to and above a folder, for an error's remedy."""
    above, near = root.absolute().parents, list[Path]()
    with suppress(OSError):
        near = sorted(each for base in (root, *above[:1]) for each in islice(base.iterdir(), 1000) if each.is_dir())
    return [*near, *above]


def _load(path: Path, reference: str) -> bytes:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device might never end
        raise DataError(f"media {shown(reference)} is not a file: correct the row")
    if found.st_size > MAX_MEDIA_BYTES:
        raise DataError(_too_large(reference))
    return _checked(path.read_bytes(), reference)


def _read_object(reference: str, root: str) -> bytes:
    key = reference.removeprefix(f"{root}/")
    if _URL.match(key) or key.startswith("/") or ".." in PurePosixPath(key).parts:
        raise _outside(reference, root)
    with tempfile.TemporaryDirectory(prefix="lmms_stream-media-") as folder:
        path = Path(folder) / "media"  # an object that is too large never fills memory
        try:
            shared_storage(root).download(key, path)
        except ObjectMissingError as error:
            raise DataError(
                f"media {shown(reference)} is missing below the media root {root}: put it there, or pass --media-root"
            ) from error
        return _load(path, reference)


def _outside(reference: str, root: str) -> DataError:
    return DataError(
        f"media {shown(reference)} leads out of the media root {root}: only what lies below it is read: move it there, "
        "or pass another --media-root"
    )
