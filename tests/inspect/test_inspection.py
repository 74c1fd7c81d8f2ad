from __future__ import annotations

import io
import json
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmms_stream.cli.console import visible
from lmms_stream.converters.convert import convert
from lmms_stream.converters.stored.sample_view import TokensView
from lmms_stream.errors import ConfigError, DataError, ShardError, StorageError
from lmms_stream.mds.lengths import LengthIndex
from lmms_stream.processors.base import IGNORED_LABEL, processor_fingerprint
from lmms_stream.processors.chat import ChatProcessor
from lmms_stream.processors.media.formats import shown_mime
from lmms_stream.processors.media.image_header import image_size
from lmms_stream.processors.text import TokensProcessor
from lmms_stream.storage.storage import open_storage
from lmms_stream.tools.demo.corpus import Corpus
from lmms_stream.tools.inspect.page import MAX_IMAGE_BYTES, MAX_TEXT, render_page, write_page
from lmms_stream.tools.inspect.summary import (
    MAX_DRAWN,
    Inspection,
    histogram,
    inspect_dataset,
    inspect_sample,
    save_media,
)
from numpy.typing import NDArray
from PIL import Image
from streaming import CSVWriter, MDSWriter

from ..conftest import run_cli, write_tokens

EVIL = "<script>alert(1)</script>\" onload='x' &amp; \x1b[31mred\x07 \u202eabc [bold]not markup[/bold] \ud800"
WAV = b"RIFF\0\0\0\0WAVEfmt " + bytes(40)


def png(width: int, height: int, *, noise: bool = False) -> bytes:
    pixels = np.zeros((height, width, 3), np.uint8)
    if noise:
        pixels[:] = np.random.default_rng(0).integers(0, 256, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_chats(folder: Path, chats: list[tuple[list[dict[str, Any]], bytes]], **settings: Any) -> str:
    columns = {"messages": "str", "media": "bytes"}
    with MDSWriter(columns=columns, out=str(folder), hashes=["xxh3_64"], **settings) as writer:
        for messages, media in chats:
            writer.write({"messages": json.dumps(messages), "media": media})
    return str(folder)


def picture_chat(*, text: str = EVIL, role: str = "user") -> tuple[list[dict[str, Any]], bytes]:
    """A question about two pictures and a sound."""
    one, two = png(32, 16), png(5, 7)
    spans = [(0, len(one)), (len(one), len(two)), (len(one) + len(two), len(WAV))]
    kinds = [("image", "image/png"), ("image", "image/jpeg"), ("audio", "audio/x-unheard")]  # the second mime is wrong
    parts = [{"type": kind, "mime": mime, "span": span} for (kind, mime), span in zip(kinds, spans, strict=True)]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": text}]}
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [parts[0], {"type": "text", "text": text}, *parts[1:]]},
        call,
    ]
    return messages, one + two + WAV


def sample_bytes(folder: Path) -> list[int]:
    sizes = []
    for path in sorted(folder.glob("*.mds")):
        data = path.read_bytes()
        offsets: NDArray[np.uint32] = np.frombuffer(data, "<u4", int.from_bytes(data[:4], "little") + 1, 4)
        sizes += np.diff(offsets.astype(int)).tolist()
    return sizes


class Page(HTMLParser):
    """The elements of a page, its text, and what it would load."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.marked: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data
        if "mark" in self.open:
            self.marked[-1] += data

    @property
    def loaded(self) -> list[str]:
        names = ("src", "href", "xlink:href", "data", "action", "srcset", "poster")
        values = [str(value) for _, found in self.elements for name, value in found.items() if name in names]
        return [value for value in values if not value.startswith("#")]  # a figure's own glyphs


def test_a_dataset_is_described_by_what_its_index_and_headers_say(tmp_path: Path) -> None:
    lengths = write_tokens(tmp_path, num_samples=300)
    found = inspect_dataset(str(tmp_path))
    sizes = sample_bytes(tmp_path)
    assert (found.schema, found.num_samples, found.compression) == ("tokens", 300, None)
    assert found.columns == {"input_ids": "ndarray:int32", "loss_spans": "ndarray:int32"}
    assert found.num_bytes == found.stored_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.mds"))
    assert found.num_measured_shards == found.num_shards > 2
    spread = found.sample_bytes
    assert (spread.minimum, spread.median, spread.maximum) == (min(sizes), float(np.median(sizes)), max(sizes))
    (index,) = found.lengths
    assert index.num_tokens == lengths.sum()
    assert (index.tokens.minimum, index.tokens.maximum) == (lengths.min(), lengths.max())
    assert sum(index.counts) == 300
    for first, stop, count in zip(index.edges, index.edges[1:], index.counts, strict=False):
        assert count == np.count_nonzero((lengths >= first) & (lengths < stop))


@pytest.mark.parametrize("lengths", [[1], [7, 7], [0, 0], [1, 2, 4000], [0, 9], list(range(1, 30)), [4_000_000_000]])
def test_every_length_lies_in_one_bar_of_the_histogram(lengths: list[int]) -> None:
    edges, counts = histogram(np.array(lengths, np.uint32))
    assert list(edges) == sorted(set(edges))
    assert (edges[0], edges[-1]) == (min(lengths), max(lengths) + 1)
    assert sum(counts) == len(lengths)
    assert len(counts) == len(edges) - 1 <= 17


@pytest.mark.parametrize(("first", "number"), [(0, 0), (299, 299), (-1, 299), (-300, 0), (123, 123)])
def test_samples_are_counted_from_either_end(first: int, number: int, tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=300)
    (sample,) = inspect_dataset(str(tmp_path), first=first).samples
    assert sample.number == number
    assert sample.tokens is not None
    assert set("".join(run.text for run in sample.tokens.runs).split()) == {str(number)}


def test_samples_that_follow_are_shown_over_the_edge_of_a_shard_and_end_with_the_dataset(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=300)
    samples = inspect_dataset(str(tmp_path), first=10, num_samples=150).samples
    assert [sample.number for sample in samples] == list(range(10, 160))
    assert len({sample.shard for sample in samples}) > 1
    assert [sample.number for sample in inspect_dataset(str(tmp_path), first=-2, num_samples=5).samples] == [298, 299]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first": 300}, "there is no sample 300 in a dataset of 300: choose one from -300 to 299"),
        ({"first": -301}, "there is no sample -301 in a dataset of 300"),
        ({"num_samples": 0}, "the number of samples must be at least 1, got 0"),
        ({"tokenizer": "/nowhere"}, "tokenizer '/nowhere' cannot be loaded"),
    ],
)
def test_what_cannot_be_shown_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=300)
    with pytest.raises(ConfigError, match=message):
        inspect_dataset(str(tmp_path), **settings)


def test_no_dataset_and_an_empty_one_are_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no dataset"):
        inspect_dataset(str(tmp_path))
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(ShardError, match="the dataset lists no samples: convert it again"):
        inspect_dataset(str(tmp_path))


def test_the_columns_beside_a_refused_one_are_shown(tmp_path: Path) -> None:
    with MDSWriter(columns={"text": "str", "x": "pkl"}, out=str(tmp_path)) as writer:
        writer.write({"text": "packs", "x": 1})
    found = inspect_dataset(str(tmp_path))
    assert found.columns == {"text": "str", "x": "pkl"}
    assert [sample.values for sample in found.samples] == [{"text": "packs"}]
    assert found.notes == (
        f"{tmp_path}/index.json: column 'x' is pickled, and unpickling can run code: write it in another encoding",
    )
    assert inspect_sample(str(tmp_path), 0)[0].values == {"text": "packs"}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_shards_of_texts_are_shown(compression: str | None, tmp_path: Path) -> None:
    with CSVWriter(columns={"n": "int", "word": "str"}, out=str(tmp_path), compression=compression) as writer:
        for number in range(3):
            writer.write({"n": number, "word": "x" * number})
    found = inspect_dataset(str(tmp_path), first=1)
    assert found.samples[0].values == {"n": "1", "word": "x"}
    assert (found.sample_bytes.minimum, found.sample_bytes.maximum) == (len("0,\n"), len("2,xx\n"))
    assert inspect_sample(str(tmp_path), 2)[0].values == {"n": "2", "word": "xx"}


def test_shards_that_cannot_be_read_or_have_other_columns_are_notes(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=300)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][1]["column_names"] = ["ids", "loss_spans"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    (tmp_path / "shard.00001.mds").unlink()
    found = inspect_dataset(str(tmp_path))
    assert found.num_measured_shards == found.num_shards - 1
    assert found.notes == (
        f"1 of {found.num_shards} shards have other columns than the first: shard.00001.mds has ids (ndarray:int32), "
        "loss_spans (ndarray:int32)",
        f"1 of {found.num_shards} shards cannot be read: lmms-stream verify lists what is wrong",
    )


def test_the_text_that_is_trained_on_is_told_from_the_rest(
    corpus: Corpus, chat_processor: ChatProcessor, tokenizer: Path, tmp_path: Path
) -> None:
    convert([corpus.functions], str(tmp_path / "chats"), processor=chat_processor)
    convert([corpus.functions], str(tmp_path / "tokens"), processor=chat_processor, tokenize=True)
    (chat,) = inspect_dataset(str(tmp_path / "chats"), first=5, tokenizer=str(tokenizer)).samples
    (tokens,) = inspect_dataset(str(tmp_path / "tokens"), first=5, tokenizer=str(tokenizer)).samples
    assert chat.tokens == tokens.tokens
    assert isinstance(chat.tokens, TokensView)
    row = json.loads(corpus.functions.read_text().splitlines()[5])["messages"]
    assert [message.role for message in chat.messages] == ["user", "assistant"]
    assert [message.blocks[0].text for message in chat.messages] == [message["content"] for message in row]
    trained = "".join(run.text for run in chat.tokens.runs if run.trained)
    assert trained == f"{row[1]['content']}<|end|>"
    assert row[0]["content"] in "".join(run.text for run in chat.tokens.runs if not run.trained)
    processed = chat_processor.process({"messages": json.dumps(row)})
    assert chat.tokens.num_tokens == len(processed["input_ids"])
    assert chat.tokens.num_trained == np.count_nonzero(processed["labels"] != IGNORED_LABEL)
    (plain,) = inspect_dataset(str(tmp_path / "chats"), first=5).samples
    assert plain.tokens is None


def test_media_are_described_from_their_headers_and_saved_with_their_extensions(
    tokenizer: Path, tmp_path: Path
) -> None:
    remote = write_chats(tmp_path / "made", [picture_chat()])
    found = inspect_dataset(remote, tokenizer=str(tokenizer))
    (sample,) = found.samples
    assert "a message holds audio, image, which the chat processor does not read" in sample.note
    assert [part.label for part in sample.media] == [
        f"image/png, {len(png(32, 16))} bytes, 32 x 16",
        f"image/png, {len(png(5, 7))} bytes, 5 x 7",
        f"audio/wav, {len(WAV)} bytes",
    ]
    assert [block.media for block in sample.messages[0].blocks] == [0, None, 1, 2]
    saved = save_media(found, tmp_path / "media")
    assert [path.name for path in saved] == ["sample-0-0.png", "sample-0-1.png", "sample-0-2.wav"]
    assert saved[0].read_bytes() == png(32, 16)
    assert saved[2].read_bytes() == WAV
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="name another folder with --save-media"):
        save_media(found, tmp_path / "file")


@pytest.mark.parametrize("span", [[0, 10**9], [-1, 4], [0, 0], [0], "all", None, [0.0, 3], [True, 3]])
def test_media_that_lie_elsewhere_are_an_error(span: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "span": span}]}]
    with pytest.raises(DataError, match=r"sample 0: a part of type 'image' (lies at bytes|has no span)"):
        inspect_dataset(write_chats(tmp_path, [(messages, bytes(100))]))


def test_headers_say_what_images_are_and_damaged_ones_say_nothing() -> None:
    for kind, mime in (("PNG", "png"), ("JPEG", "jpeg"), ("GIF", "gif"), ("WEBP", "webp"), ("BMP", "bmp")):
        file = io.BytesIO()
        Image.new("RGB", (13, 9)).save(file, kind)
        assert (shown_mime(file.getvalue(), "image"), image_size(file.getvalue())) == (f"image/{mime}", (13, 9))
        assert image_size(file.getvalue()[:12]) is None
    assert shown_mime(b"", "image") is None
    assert image_size(b"<svg onload='alert(1)'/>") is None
    huge = bytearray(png(1, 1))
    huge[16:24] = (1 << 16).to_bytes(4, "big") * 2  # larger than any that is decoded
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image_size(bytes(huge))


def test_values_of_any_column_are_shown_as_text(tmp_path: Path) -> None:
    columns = {
        "n": "int",
        "words": "str",
        "raw": "bytes",
        "shot": "png",
        "photo": "bytes",
        "a": "ndarray:int64",
        "j": "json",
    }
    with MDSWriter(columns=columns, out=str(tmp_path)) as writer:
        writer.write({
            "n": 7, "words": EVIL.replace("\ud800", ""), "raw": b"\0\1", "shot": Image.new("RGB", (3, 4)),
            "photo": png(8, 9), "a": np.arange(100).reshape(10, 10), "j": {"k": ["<b>"]},
        })  # fmt: skip
    found = inspect_dataset(str(tmp_path))
    (sample,) = found.samples
    assert found.schema is None
    assert sample.values["n"] == "7"
    assert sample.values["raw"] == "2 bytes"
    assert sample.values["a"].startswith("int64[10, 10]: 0 1 2 3")
    assert sample.values["a"].endswith(" 31 …")
    assert sample.values["j"] == '{"k": ["<b>"]}'
    assert [(part.width, part.height) for part in sample.media] == [(8, 9), (3, 4)]
    assert "<b>" not in render_page(found)
    with pytest.raises(ConfigError, match="the dataset holds no messages, tokens or texts: leave --tokenizer out"):
        inspect_dataset(str(tmp_path), tokenizer="x")


def test_images_are_shown_as_they_are_stored_and_modes_that_png_lacks_are_named(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("CMYK", (3, 4)).save(file, "JPEG")
    with MDSWriter(columns={"photo": "jpeg", "pixels": "pil", "small": "uint8"}, out=str(tmp_path)) as writer:
        writer.write({"photo": file.getvalue(), "pixels": Image.new("CMYK", (3, 4)), "small": np.uint8(3)})
    (sample,) = inspect_dataset(str(tmp_path)).samples
    assert sample.values == {
        "photo": "an image of 3 x 4, see media 0",
        "pixels": "an image of 3 x 4 in the mode CMYK, which is not shown",
        "small": "3",
    }
    assert [(part.mime, part.data) for part in sample.media] == [("image/jpeg", file.getvalue())]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_remote_dataset_is_looked_at_through_a_few_shards_that_are_not_kept(
    compression: str | None, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3}/inspect-{compression}"
    write_tokens(tmp_path / "made", num_samples=900, compression=compression)
    for path in (tmp_path / "made").rglob("*.*"):
        open_storage(url).upload(path, str(path.relative_to(tmp_path / "made")))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    told: list[int] = []
    found = inspect_dataset(url, first=450, on_start=told.append, on_shard=lambda: told.append(1))
    assert found.samples[0].number == 450
    assert found.num_shards > 4
    assert found.num_measured_shards == 4
    assert told == [4, 1, 1, 1, 1]
    assert found.compression == compression
    assert (found.stored_bytes < found.num_bytes) == (compression is not None)
    assert len(found.lengths) == 1
    assert [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()] == []
    assert f"(in 4 of the {found.num_shards} shards)" in render_page(found)


def test_a_lengths_index_that_is_damaged_is_a_note(tmp_path: Path) -> None:
    write_tokens(tmp_path, num_samples=30)
    fingerprint = processor_fingerprint(TokensProcessor())
    LengthIndex.from_array(np.arange(1, 30, dtype=np.uint32), fingerprint=fingerprint).write(tmp_path)
    found = inspect_dataset(str(tmp_path))
    assert found.lengths == ()
    assert found.notes == (
        f"lengths index {fingerprint} has 29 lengths for 30 samples: write it again with lmms-stream index",
    )
    (array,) = tmp_path.glob("_lmms/lengths/*.npy")
    array.unlink()
    assert "is missing: write it again with lmms-stream index" in inspect_dataset(str(tmp_path)).notes[0]


def page_of(inspection: Inspection) -> Page:
    return Page(render_page(inspection))


def test_the_page_loads_and_runs_nothing_whatever_the_samples_hold(tmp_path: Path) -> None:
    messages, media = picture_chat(role=EVIL)
    page = page_of(inspect_dataset(write_chats(tmp_path, [(messages, media)])))
    tags = [tag for tag, _ in page.elements]
    assert "script" not in tags
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]
    assert len(page.loaded) == 2
    assert all(value.startswith("data:image/png;base64,") for value in page.loaded)
    assert "<script>alert(1)</script>\" onload='x' &amp; \\x1b[31mred\\x07 \\u202eabc" in page.text
    assert "\\ud800" in page.text
    (policy,) = [found["content"] for tag, found in page.elements if tag == "meta" and "http-equiv" in found]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_the_page_marks_what_is_trained_on_and_draws_the_lengths(
    corpus: Corpus, chat_processor: ChatProcessor, tokenizer: Path, tmp_path: Path
) -> None:
    convert([corpus.functions], str(tmp_path / "made"), processor=chat_processor)
    found = inspect_dataset(str(tmp_path / "made"), num_samples=3, tokenizer=str(tokenizer))
    write_page(found, tmp_path / "pages" / "page.html")
    text = (tmp_path / "pages" / "page.html").read_text()
    page = Page(text)
    expected = []
    for sample in found.samples:
        assert sample.tokens is not None
        expected += [f"{sample.tokens.num_trained:,} of them trained on"]
        expected += [visible(run.text) for run in sample.tokens.runs if run.trained]
    assert page.marked == expected
    assert [tag for tag, _ in page.elements].count("svg") == 2
    assert page.loaded == []
    assert not re.search(r"url\((?!#)", text)
    assert text == render_page(found)  # the same bytes again
    with pytest.raises(StorageError, match="name another file with --html"):
        write_page(found, tmp_path)


def test_samples_are_drawn_evenly_for_histograms_of_images_and_of_tokens_that_are_trained_on(
    tokenizer: Path, tmp_path: Path
) -> None:
    sizes = [(8, 30), (40, 8), (5, 7)] * 100
    chats = [
        ([{"role": "user", "content": [{"type": "image", "span": [0, len(png(*size))]}]}], png(*size)) for size in sizes
    ]
    found = inspect_dataset(write_chats(tmp_path / "images", chats, size_limit=20_000)).drawn
    assert found.image_sides is not None
    assert found.trained_shares is None
    assert 100 <= found.num_samples == sum(found.image_sides.counts) <= MAX_DRAWN
    assert (found.image_sides.edges[0], found.image_sides.edges[-1]) == (7, 41)
    lengths = write_tokens(tmp_path / "tokens", num_samples=40).astype(int)
    found = inspect_dataset(str(tmp_path / "tokens")).drawn
    assert found.trained_shares is not None
    shares = (lengths - lengths // 2) / lengths
    assert found.trained_shares.counts == tuple(np.histogram(shares, bins=np.linspace(0, 1, 11))[0])
    bad = [*chats[:3], ([{"role": "user", "content": [{"type": "image", "span": [0, 10**9]}]}], b"x")]
    note = "1 of 4 drawn samples are in no histogram, as they cannot be read; the first: shard.00000.mds: sample 3: "
    assert any(each.startswith(note) for each in inspect_dataset(write_chats(tmp_path / "bad", bad)).notes)


def test_settings_of_a_processor_are_a_table_and_axes_have_plain_numbers(
    corpus: Corpus, chat_processor: ChatProcessor, tmp_path: Path
) -> None:
    convert([corpus.functions], str(tmp_path / "made"), processor=chat_processor)
    write_tokens(tmp_path / "narrow", num_samples=30)
    page = render_page(inspect_dataset(str(tmp_path / "made")))
    assert "<tr><th>class<td>ChatProcessor<tr><th>" in page
    assert "{&#x27;" not in page
    assert "lengths of the samples, measured by ChatProcessor -->" in page
    assert "<!-- 200 -->" in page
    assert "\\times" not in page


def test_images_that_are_too_large_for_the_page_and_long_texts_are_cut_and_counted(tmp_path: Path) -> None:
    large = png(800, 800, noise=True)
    assert len(large) > MAX_IMAGE_BYTES
    image = {"type": "image", "mime": "image/png", "span": [0, len(large)]}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "x" * (MAX_TEXT + 1234)}]}]
    page = page_of(inspect_dataset(write_chats(tmp_path, [(messages, large)])))
    assert page.loaded == []
    assert "800 x 800 (too large for this page: see it with --save-media)" in page.text
    assert "… (1,234 more characters)" in page.text


def test_what_claims_to_be_an_image_is_embedded_only_when_its_header_says_so(tmp_path: Path) -> None:
    evil = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"
    for mime in ("image/svg+xml", "image/png", 'text/html"><script>'):
        messages = [{"role": "user", "content": [{"type": "image", "mime": mime, "span": [0, len(evil)]}]}]
        page = page_of(inspect_dataset(write_chats(tmp_path / mime[-3:], [(messages, evil)])))
        assert page.loaded == []
        assert mime in page.text


def test_text_shows_itself_in_a_terminal() -> None:
    assert visible("a\tb\né 👩‍👧 ف") == "a\tb\né 👩‍👧 ف"
    assert visible("\x00\x1b\r\x7f\x9b\u2028\u202e\u2066\ufeff\ud800") == (
        "\\x00\\x1b\\x0d\\x7f\\x9b\\u2028\\u202e\\u2066\\ufeff\\ud800"
    )


def test_the_command_prints_the_sample_with_its_control_characters_escaped(tmp_path: Path) -> None:
    remote = write_chats(tmp_path / "made", [picture_chat(), picture_chat(text="last")])
    page, media = tmp_path / "page.html", tmp_path / "media"
    result = run_cli("inspect", remote, "--html", str(page), "--save-media", str(media))
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert "\\x1b[31mred\\x07 \\u202eabc [bold]not markup[/bold] \\ud800" in result.stdout
    assert "[media 0: image/png, " in result.stdout
    assert f"saved {media}/sample-0-2.wav" in result.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")
    result = run_cli("inspect", remote, "-i", "-1", "--json")
    found = json.loads(result.stdout)
    assert found["samples"][0]["number"] == 1
    assert found["samples"][0]["messages"][0]["blocks"][1]["text"] == "last"
    assert found["samples"][0]["media"][0]["width"] == 32
    assert "data" not in found["samples"][0]["media"][0]
    result = run_cli("inspect", remote, "-i", "2")
    assert result.returncode == 1
    assert result.stderr == "error: there is no sample 2 in a dataset of 2: choose one from -2 to 1\n"


def test_the_command_shows_lengths_as_bars_and_marks_what_is_trained_on(dataset_folder: Path, tokenizer: Path) -> None:
    result = run_cli("inspect", str(dataset_folder), "--tokenizer", str(tokenizer))
    assert result.returncode == 0, result.stderr
    assert re.search(r"\d+ to \d+ +█+ +\d+", result.stdout)
    assert re.search(r"\d+ tokens, \d+ of them trained on, between ⟦ and ⟧", result.stdout)
    assert re.search(r"<\|assistant\|>\n⟦[^⟧]+<\|end\|>⟧", result.stdout)
