from __future__ import annotations

import importlib.util
import json
import os
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import lmms_stream.converters.rows.references as media_module
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.converters.rows.mapper import find_mapper
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.rows.references import SampleMedia, shown
from lmms_stream.errors import DataError, StorageError
from lmms_stream.processors.media.formats import (
    _MIMES,
    Kind,
    extension_of,
    looks_like_base64,
    media_format,
    mime_type,
    shown_mime,
)
from lmms_stream.processors.media.image_header import fit_image, image_size
from lmms_stream.storage.storage import open_storage
from PIL import Image

from ...strategies import examples
from ..media_files import CLIP, HEADERS, MP4, image_bytes, wav_bytes

FORMS = {"PNG": "png", "JPEG": "jpeg", "GIF": "gif", "WEBP": "webp", "BMP": "bmp", "TIFF": "tiff", "AVIF": "avif"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A media root with an image and a sound in it, a secret beside it, and ways out to the secret."""
    folder = tmp_path / "root"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "a.png").write_bytes(image_bytes())
    (folder / "a.wav").write_bytes(wav_bytes())
    (tmp_path / "secret.png").write_bytes(image_bytes(color=9))
    (tmp_path / "rooted").mkdir()  # its name begins with the root's
    (tmp_path / "rooted" / "secret.png").write_bytes(image_bytes(color=9))
    (folder / "link.png").symlink_to("../secret.png")
    (folder / "links").symlink_to(tmp_path)
    (folder / "inside.png").symlink_to("below/a.png")
    (folder / "circle.png").symlink_to("circle.png")
    return folder


def read(root: Path | str | None, reference: Any, kind: str = "image") -> bytes:
    """The bytes that are stored for one reference."""
    media = SampleMedia(None if root is None else str(root))
    part = media.add(kind, reference)
    assert (part["type"], part["span"]) == (kind, [0, len(media.data)])
    return media.data


@pytest.mark.parametrize("form", FORMS)
def test_images_are_known_by_their_bytes_and_stored_as_they_are(form: str) -> None:
    data = image_bytes(form)
    assert mime_type(data, "image") == f"image/{FORMS[form]}"
    assert fit_image(data, max_pixels=None) == fit_image(data, max_pixels=12) == (data, (4, 3))


@pytest.mark.parametrize(
    ("mime", "header"), [(mime, header) for mime, headers in HEADERS.items() for header in headers]
)
def test_first_bytes_say_what_media_are(mime: str, header: bytes) -> None:
    kind: Any = mime.partition("/")[0]
    assert mime_type(header, kind) == mime


def test_containers_hold_what_the_reference_says() -> None:
    assert mime_type(MP4, "audio") == "audio/mp4"
    assert mime_type(HEADERS["video/webm"][0], "audio") == "audio/webm"
    assert mime_type(HEADERS["audio/ogg"][0], "video") == "video/ogg"


@examples(300)
@given(data=st.binary(max_size=40))
def test_bytes_are_of_a_known_format_and_kind_or_refused(data: bytes) -> None:
    kinds: tuple[Kind, ...] = ("image", "audio", "video")
    mimes = _MIMES.get(media_format(data) or "", {})
    for kind in kinds:
        if kind in mimes:
            assert mime_type(data, kind) == mimes[kind]
        else:
            refused = r"are of no known format: expected|, where media of kind|Git LFS pointer"
            with pytest.raises(DataError, match=refused):
                mime_type(data, kind)


@pytest.mark.parametrize(
    "reference",
    [
        "below/a.png", "./below/../below/a.png", "inside.png", "links/root/below/a.png",
        lambda root: str(root / "below" / "a.png"), lambda root: (root / "below" / "a.png").as_uri(),
        lambda root: {"bytes": None, "path": "below/a.png"}, lambda root: {"bytes": image_bytes(), "path": "no.png"},
        lambda root: image_bytes(), lambda root: bytearray(image_bytes()),
        lambda root: b64encode(image_bytes()).decode(),
        lambda root: "\n".join(b64encode(image_bytes()).decode()[n : n + 76] for n in range(0, 400, 76)),
        lambda root: f"data:application/octet-stream;base64,{b64encode(image_bytes()).decode()}",
    ],
)  # fmt: skip
def test_every_kind_of_reference_leads_to_the_same_bytes(reference: str | Callable[[Path], Any], root: Path) -> None:
    assert read(root, reference(root) if callable(reference) else reference) == image_bytes()


@pytest.mark.parametrize(
    "reference",
    [
        "../secret.png", "below/../../secret.png", "link.png", "links/secret.png", "../rooted/secret.png", "..",
        "/etc/passwd", "../../../../../../../../etc/passwd", "file:///etc/passwd", "file://localhost/etc/passwd",
        "file:///%2e%2e/etc/passwd", "s3://bucket/secret.png", lambda root: str(root.parent / "secret.png"),
        lambda root: {"bytes": None, "path": "../secret.png"}, "../no-such-file.png",
    ],
)  # fmt: skip
def test_no_reference_leads_out_of_the_media_root(reference: str | Callable[[Path], Any], root: Path) -> None:
    chosen = reference(root) if callable(reference) else reference
    with pytest.raises(DataError, match=r"media '.*' leads out of the media root .*root: .*--media-root") as raised:
        read(root, chosen)
    name = chosen["path"] if isinstance(chosen, dict) else chosen
    assert name.removeprefix("file://").removeprefix("localhost").rpartition("/")[2] in str(raised.value)


SEGMENTS = st.sampled_from(
    ["..", ".", "below", "links", "root", "rooted", "a.png", "secret.png", "link.png", "", "etc"]
)


def test_whatever_path_is_made_of_links_and_dots_reads_inside_or_nothing(root: Path) -> None:
    @examples(400)
    @given(segments=st.lists(SEGMENTS, min_size=1, max_size=7), absolute=st.booleans())
    def check(segments: list[str], absolute: bool) -> None:
        try:
            data = read(root, (str(root) + "/" if absolute else "") + "/".join(segments))
        except DataError:
            return
        assert data == image_bytes()  # never the secret

    check()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("no.png", r"media 'no\.png' is missing below the media root .*: put it there, or pass --media-root"),
        ("a.wav/x.png", "is missing below the media root"),
        ("below", "media 'below' is not a file: correct the row"),
        ("circle.png", "cannot be read|is missing"),
        ("a\0.png", "cannot be read"),
        ("x" * 300, r"media 'xxx.*… \(302 characters\) cannot be read"),
        ("empty.png", r"media 'empty\.png' is empty: repair or remove it"),
        ("text.png", r"image 'text\.png': its first bytes b'not an i' are of no known format: expected png, jpeg, gif"),
        ("half.png", r"image 'half\.png': Pillow cannot read its header .*: repair it, or convert it to JPEG or PNG"),
        ("a.wav", r"image 'a\.wav': it is audio/wav, where media of kind image are expected"),
        ("http://x.org/a.png", "is on the web, and conversions do not download media: download it first"),
        ("HTTPS://x.org/a.png", "is on the web"),
        ("pipe.png", "is not a file"),
        ("", "media '' must be a path, bytes, base64, or an object with one of them"),
        (3, "media 3 must be a path, bytes"),
        ({"path": None}, "media with path must be a path, bytes"),
        ({"array": [0.1], "sampling_rate": 16000}, "media with array, sampling_rate must be a path, bytes"),
        (HEADERS["image/avif"][0], "Pillow cannot read its header .* or convert it to JPEG or PNG"),
        (b"", "media of 0 bytes is empty"),
        ("data:image/png,abc", "expected data:MIME;base64,"),
        ("data:image/png;base64,a*c", "is not valid base64"),
        ("data:image/png;base64,", "is empty"),
    ],
)
def test_media_that_cannot_be_used_are_refused_by_name(reference: Any, reason: str, root: Path) -> None:
    (root / "empty.png").write_bytes(b"")
    (root / "text.png").write_bytes(b"not an image")
    (root / "half.png").write_bytes(image_bytes()[:12])
    os.mkfifo(root / "pipe.png")
    with pytest.raises(DataError, match=reason):
        read(root, reference)


def test_media_without_a_root_are_bytes_alone(root: Path) -> None:
    assert read(None, image_bytes()) == image_bytes()
    with pytest.raises(DataError, match=r"media 'a\.png' is a path, and the source has no folder: pass --media-root"):
        read(None, "a.png")
    with pytest.raises(DataError, match=r"media 'a\.png' is missing below the media root .*absent"):
        read(root / "absent", "a.png")


def test_media_too_large_for_a_shard_are_refused_before_they_are_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (root / "large.png").open("wb") as file:
        file.truncate((1 << 31) + 1)  # a hole: it takes no space
    with pytest.raises(
        DataError, match=rf"media 'large\.png' has more than {1 << 31} bytes, which a shard cannot hold"
    ):
        read(root, "large.png")
    monkeypatch.setattr(media_module, "MAX_MEDIA_BYTES", 100)
    with pytest.raises(DataError, match="media of 101 bytes has more than 100 bytes"):
        read(root, bytes(101))
    with pytest.raises(DataError, match="has more than 100 bytes"):
        read(root, "data:;base64," + "A" * 200)
    media = SampleMedia(None)
    media.add("audio", wav_bytes())
    with pytest.raises(DataError, match="the sample's media have more than 100 bytes: split the sample"):
        media.add("audio", wav_bytes())


def test_objects_below_a_url_are_read_and_no_others(s3_folder: str) -> None:
    storage = open_storage(f"{s3_folder}/media")
    storage.write("below/a.png", image_bytes())
    open_storage(s3_folder).write("secret.png", image_bytes(color=9))
    for reference in ("below/a.png", f"{s3_folder}/media/below/a.png"):
        for root in (f"{s3_folder}/media", f"{s3_folder}/media/"):
            assert read(root, reference) == image_bytes()
    outside = [
        "../secret.png",
        "below/../../secret.png",
        f"{s3_folder}/secret.png",
        "/below/a.png",
        "file:///etc/passwd",
    ]
    for reference in [*outside, f"{s3_folder}/media/../secret.png", f"{s3_folder}/mediaeval/a.png"]:
        with pytest.raises(DataError, match="leads out of the media root s3://"):
            read(f"{s3_folder}/media", reference)
    with pytest.raises(DataError, match=r"media 'no\.png' is missing below the media root s3://"):
        read(f"{s3_folder}/media", "no.png")
    with pytest.raises(StorageError, match="bucket 'no-such-bucket' does not exist"):
        read("s3://no-such-bucket/x", "a.png")


def test_rows_read_from_their_own_folder_or_from_the_media_root(root: Path) -> None:
    row = {"question": "What?", "answer": "That.", "image": "below/a.png"}
    assert find_mapper([row], SchemaOptions())(row, str(root))["media"] == image_bytes()
    mapper = find_mapper([row], SchemaOptions(media_root=str(root)))
    assert mapper(row, "/elsewhere")["media"] == mapper(row, None)["media"] == image_bytes()
    with pytest.raises(DataError, match=r"leads out of the media root"):
        find_mapper([row], SchemaOptions())(row | {"image": "../secret.png"}, str(root))


WRITABLE = [(form, mode) for form in [*FORMS, "MPO"] for mode in ("RGB", "L", "1")]


@pytest.mark.parametrize(("form", "mode"), [*WRITABLE, ("PNG", "P"), ("GIF", "P"), ("TIFF", "P"), ("PNG", "I;16")])
def test_only_images_with_too_many_pixels_are_made_smaller_in_their_format(form: str, mode: str) -> None:
    data = image_bytes(form, size=(60, 30), mode=mode)
    assert fit_image(data, max_pixels=1800) == (data, (60, 30))
    stored, facts = fit_image(data, max_pixels=450)
    assert facts == (30, 15)
    with Image.open(BytesIO(stored)) as small:
        small.load()
        assert small.format == ("JPEG" if form == "MPO" else form)
        assert small.size == (30, 15)


@examples(80)
@given(width=st.integers(1, 400), height=st.integers(1, 400), max_pixels=st.integers(1, 5000))
def test_a_smaller_image_has_at_most_the_pixels_and_keeps_its_aspect(width: int, height: int, max_pixels: int) -> None:
    data = image_bytes("BMP", size=(width, height))
    stored, facts = fit_image(data, max_pixels=max_pixels)
    with Image.open(BytesIO(stored)) as small:
        new_width, new_height = small.size
    assert facts == (new_width, new_height)
    assert new_width * new_height <= max(max_pixels, 1)
    if width * height <= max_pixels:
        assert (new_width, new_height) == (width, height)
    elif min(width, height) ** 2 * max_pixels >= width * height:  # no side shrinks to less than a pixel
        assert abs(new_width - width * (max_pixels / (width * height)) ** 0.5) <= 1
        assert abs(new_height - height * (max_pixels / (width * height)) ** 0.5) <= 1


def test_a_smaller_photograph_keeps_what_says_how_it_is_turned() -> None:
    buffer, exif = BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (100, 50)).save(buffer, "JPEG", exif=exif)
    assert fit_image(buffer.getvalue(), max_pixels=None)[1] == (50, 100)
    stored, facts = fit_image(buffer.getvalue(), max_pixels=100)
    with Image.open(BytesIO(stored)) as small:
        assert small.getexif()[0x0112] == 6
        assert facts == (small.height, small.width)


def test_images_that_cannot_be_made_smaller_are_refused() -> None:
    buffer = BytesIO()
    frames = [Image.new("RGB", (20, 20), (n, 0, 0)) for n in range(3)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert fit_image(buffer.getvalue(), max_pixels=400) == (buffer.getvalue(), (20, 20))
    with pytest.raises(DataError, match="it has 20 x 20 pixels, more than 100, in 3 frames: only single images"):
        fit_image(buffer.getvalue(), max_pixels=100)
    cut = image_bytes("JPEG", size=(300, 300))[:-400]
    assert fit_image(cut, max_pixels=None) == (cut, (300, 300))  # only headers are read
    with pytest.raises(DataError, match="it cannot be made smaller"):
        fit_image(cut, max_pixels=100)


def test_an_image_that_would_fill_memory_is_refused_unread() -> None:
    def png_of(width: int, height: int) -> bytes:
        """A PNG whose header claims a size."""
        import zlib

        data = image_bytes()
        header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + data[24:29]
        return data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]

    large = png_of(10_000, 10_000)  # beyond half of Pillow's guard, where it warns
    assert fit_image(large, max_pixels=None) == (large, (10_000, 10_000))
    with pytest.raises(
        DataError, match=r"Image size \(3600000000 pixels\) exceeds limit .*: make it smaller beforehand"
    ):
        fit_image(png_of(60_000, 60_000), max_pixels=100)


def test_base64_is_told_from_paths() -> None:
    for data in (image_bytes("JPEG"), image_bytes(), wav_bytes(), MP4 + bytes(20), image_bytes("BMP")):
        assert looks_like_base64(b64encode(data).decode())
    paths = ["a.png", "/9j/a", "images/" * 10 + "a", "/" + "data/" * 20 + "00042", "A" * 400, "iVBORw0KGgo"]
    assert not any(looks_like_base64(path) for path in paths)


def test_long_references_are_shown_by_their_beginning() -> None:
    assert shown("a.png") == "'a.png'"
    assert shown("x" * 1000).endswith("… (1002 characters)")
    assert shown({"bytes": b"abc", "path": None}) == "of 3 bytes"


def test_media_are_joined_in_the_order_of_the_conversation() -> None:
    pieces = [image_bytes(), wav_bytes(), CLIP, image_bytes("GIF")]
    content = [
        {"type": kind, kind: data} for kind, data in zip(("image", "audio", "video", "image"), pieces, strict=True)
    ]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}
    sample = find_mapper([row], SchemaOptions())(row, None)
    spans = [part["span"] for part in json.loads(sample["messages"])[0]["content"]]
    assert [sample["media"][offset : offset + size] for offset, size in spans] == pieces
    assert spans[-1][0] + spans[-1][1] == len(sample["media"])


def test_heic_images_say_what_reads_them(root: Path) -> None:
    (root / "phone.heic").write_bytes(HEADERS["image/heic"][0])
    if importlib.util.find_spec("pillow_heif") is None:
        wanted = "it is HEIC, which Pillow alone does not read: convert it to JPEG or PNG, or pip install pillow-heif"
    else:  # this is a header alone
        wanted = "Pillow cannot read its header"
    with pytest.raises(DataError, match=rf"image 'phone\.heic': {wanted}"):
        read(root, "phone.heic")
    assert image_size(HEADERS["image/heic"][0]) is None


@pytest.mark.parametrize(
    ("data", "kind", "mime", "extension"),
    [
        (image_bytes("JPEG"), "image", "image/jpeg", ".jpg"),
        (image_bytes("TIFF"), "", "image/tiff", ".tiff"),
        (MP4, "audio", "audio/mp4", ".m4a"),
        (MP4, "", "video/mp4", ".mp4"),
        (HEADERS["audio/mp4"][0], "video", "audio/mp4", ".m4a"),
        (HEADERS["audio/mpeg"][0], "audio", "audio/mpeg", ".mp3"),
        (HEADERS["video/webm"][0], "video", "video/webm", ".webm"),
        (HEADERS["video/x-matroska"][0], "video", "video/x-matroska", ".mkv"),
        (HEADERS["video/quicktime"][0], "video", "video/quicktime", ".mov"),
    ],
)
def test_media_are_shown_and_saved_as_what_they_were_stored_as(
    data: bytes, kind: str, mime: str, extension: str
) -> None:
    assert (shown_mime(data, kind), extension_of(mime)) == (mime, extension)
    assert (shown_mime(b"unheard", kind), extension_of("text/html")) == (None, ".bin")


def test_the_table_of_formats_names_each_that_is_found() -> None:
    found = {media_format(header) for headers in HEADERS.values() for header in headers}
    found |= {media_format(image_bytes(form)) for form in FORMS} | {media_format(wav_bytes())}
    assert found == set(_MIMES)
