"""What conversions store of media, and what they find broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.converters.convert import convert
from lmms_stream.converters.rows.options import SchemaOptions
from lmms_stream.converters.stored.verify import verify_dataset
from lmms_stream.errors import ConfigError, DataError, StorageError
from lmms_stream.mds.packed import PackedStreamingDataset
from lmms_stream.processors.base import FactsMissingError
from lmms_stream.processors.media.facts import facts_of, sound_of_video, stored_facts, stored_sound
from lmms_stream.processors.multimodal import MultimodalProcessor
from lmms_stream.tools.inspect.summary import inspect_dataset
from streaming import MDSWriter

from ...conftest import run_cli
from ...processors.media.clips import empty_moov, flipped, moov_first, sound_bytes, video_bytes
from ...processors.media.pictures import noisy, turned
from ...processors.tiny_sound import save_sound_processor, sounding_film
from ..media_files import CLIP, image_bytes, wav_bytes
from ..sources.source_rows import json_lines, write

MEDIA = {
    "photo.jpg": ("image", turned("JPEG", 6, size=(60, 40))),
    "chart.png": ("image", image_bytes(size=(31, 17))),
    "clip.mp4": ("video", video_bytes(rotation=90)),
    "clip.mkv": ("video", video_bytes("matroska", num_frames=17, rate=25)),
    "talk.wav": ("audio", wav_bytes(num_samples=123)),
    "talk.mp3": ("audio", sound_bytes("mp3")),
}
FACTS: dict[str, dict[str, int | float]] = {
    "photo.jpg": {"width": 40, "height": 60},
    "chart.png": {"width": 31, "height": 17},
    "clip.mp4": {"width": 48, "height": 64, "frames": 30, "fps": 10.0},
    "clip.mkv": {"width": 64, "height": 48, "frames": 17, "fps": 25.0},
    "talk.wav": {"samples": 123, "rate": 16000},
    "talk.mp3": {"samples": 10_000, "rate": 16000},
}


def rows_of(names: list[str], kinds: list[str]) -> list[dict[str, Any]]:
    """A chat about each file."""
    return [
        {
            "messages": [
                {"role": "user", "content": [{"type": kind, "path": name}, {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": "That."},
            ]
        }
        for name, kind in zip(names, kinds, strict=True)
    ]


def written(folder: Path, media: dict[str, tuple[str, bytes]]) -> Path:
    for name, (_, data) in media.items():
        write(folder / name, data)
    return write(folder / "rows.jsonl", json_lines(rows_of(list(media), [kind for kind, _ in media.values()])))


def stored_parts(folder: Path) -> list[tuple[dict[str, Any], bytes]]:
    """The first part of each sample, and its bytes."""
    found = []
    for sample in PackedStreamingDataset(folder)[:]:
        part = json.loads(sample["messages"])[0]["content"][0]
        offset, size = part["span"]
        found.append((part, sample["media"][offset : offset + size]))
    return found


@pytest.mark.parametrize("check_media", ["header", "decode"])
def test_every_stored_part_has_the_facts_about_its_bytes(check_media: Any, tmp_path: Path) -> None:
    source = written(tmp_path / "data", MEDIA)
    options = SchemaOptions(check_media=check_media)
    convert([source], str(tmp_path / "out"), schema=options, num_workers=1)
    for (name, facts), (part, data) in zip(FACTS.items(), stored_parts(tmp_path / "out"), strict=True):
        assert data == MEDIA[name][1]
        assert part.items() >= facts.items()
        assert stored_facts(part) == facts_of(data, part["type"])
    assert verify_dataset(str(tmp_path / "out"), deep=True, num_workers=1).problems == ()


def test_the_facts_of_an_image_that_is_made_smaller_are_of_what_is_stored(tmp_path: Path) -> None:
    source = written(tmp_path / "data", {"photo.jpg": MEDIA["photo.jpg"]})
    convert([source], str(tmp_path / "out"), schema=SchemaOptions(max_image_pixels=600), num_workers=1)
    ((part, data),) = stored_parts(tmp_path / "out")
    assert (part["width"], part["height"]) == facts_of(data, "image") == (20, 30)


def test_what_a_row_says_by_the_name_of_a_fact_is_kept_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", CLIP)
    part = {"type": "video", "video": "clip.mp4", "fps": 2.0, "width": 320, "nframes": 8}
    rows = [{"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]}]
    convert([write(tmp_path / "rows.jsonl", json_lines(rows))], str(tmp_path / "out"), num_workers=1)
    ((stored, _),) = stored_parts(tmp_path / "out")
    assert (stored["said_fps"], stored["said_width"], stored["nframes"]) == (2.0, 320, 8)
    assert (stored["fps"], stored["width"]) == (10.0, 48)


def test_the_sound_of_a_video_is_counted_at_conversion_and_measured_without_its_bytes(tmp_path: Path) -> None:
    save_sound_processor(tmp_path / "processor", "qwen2_5_omni")
    processor = MultimodalProcessor.from_pretrained(str(tmp_path / "processor"), use_audio_in_video=True)
    film = sounding_film(num_frames=12, fps=6, samples=30000, rate=22050)
    write(tmp_path / "film.mp4", film)
    write(tmp_path / "silent.mp4", sounding_film(num_frames=12, fps=6, samples=0))
    parts = [{"type": "video", "video": name, "sound_samples": 7} for name in ("film.mp4", "silent.mp4")]
    source = write(tmp_path / "rows.jsonl", json_lines([of_a_video(part) for part in parts]))
    convert([source], str(tmp_path / "out"), num_workers=1)
    (part, data), (silent, _) = stored_parts(tmp_path / "out")
    heard = sound_of_video(data)
    assert heard is not None
    assert (part["sound_samples"], part["sound_rate"]) == (heard.samples, heard.rate) == (heard.samples, 22050)
    assert part["said_sound_samples"] == silent["said_sound_samples"] == 7
    assert stored_sound(silent) is None
    for sample in PackedStreamingDataset(tmp_path / "out")[:1]:
        older = json.loads(sample["messages"])
        for name in ("sound_samples", "sound_rate"):
            del older[0]["content"][0][name]
        without = {**sample, "messages": json.dumps(older)}
        tokens = processor.measure({"messages": sample["messages"]})
        assert tokens == processor.measure(without) == len(processor.process(sample)["input_ids"])
        with pytest.raises(FactsMissingError, match="the sound of a video is counted from its bytes: give the column"):
            processor.measure({"messages": without["messages"]})
    assert verify_dataset(str(tmp_path / "out"), deep=True, num_workers=1).problems == ()


@pytest.mark.parametrize("said", [{"sound_samples": 0, "sound_rate": 16000}, {"sound_samples": 5}])
def test_facts_about_the_sound_of_a_video_that_are_no_counts_are_named(said: dict[str, int]) -> None:
    with pytest.raises(
        DataError, match=r"a part of type 'video' says .* of its sound, expected whole numbers above 0: c"
    ):
        stored_sound({"type": "video", **said})


def of_a_video(part: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}], **columns}


def test_the_seconds_of_a_video_that_its_part_or_reference_names_are_stored_and_shown(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", MEDIA["clip.mp4"][1])
    said = {"video_start": 1, "video_end": 2.5}
    rows = [
        of_a_video({"type": "video_url", "video_url": {"url": "clip.mp4", **said}}),  # LMMS Engine's
        of_a_video({"type": "video", "video": "clip.mp4", **said}),  # qwen_vl_utils'
        of_a_video({"type": "video"}, videos=[{"path": "clip.mp4", "bytes": None, **said}]),
        of_a_video({"type": "video_url", "video_url": {"url": "clip.mp4", "video_start": 2, "video_end": None}}),
        of_a_video({"type": "video_url", "video_url": {"url": "clip.mp4"}}),
        of_a_video({"type": "video", "path": "clip.mp4", "video_end": 60}),  # behind its end
    ]
    for number, row in enumerate(rows):
        convert([write(tmp_path / "rows.jsonl", json_lines([row]))], str(tmp_path / f"{number}"), num_workers=1)
    parts = [stored_parts(tmp_path / f"{number}")[0][0] for number in range(len(rows))]
    kept = [{name: part[name] for name in ("video_start", "video_end") if name in part} for part in parts]
    assert kept == [said, said, said, {"video_start": 2}, {}, {"video_end": 60}]
    assert all(part.items() >= FACTS["clip.mp4"].items() for part in parts)
    labels = [inspect_dataset(str(tmp_path / f"{number}")).samples[0].media[0].label for number in range(len(rows))]
    frames = "30 frames at 10 a second"
    assert [label.partition(frames)[2] for label in labels] == [
        *[", of which seconds 1 to 2.5 are read"] * 3,
        ", of which seconds 2 to the end are read",
        "",
        ", of which seconds 0 to 60 are read",
    ]


def test_wrong_seconds_of_a_video_are_named_at_conversion(tmp_path: Path) -> None:
    write(tmp_path / "clip.mp4", MEDIA["clip.mp4"][1])
    for said, message in (
        ({"video_start": -1}, "its video_start is -1, expected seconds of the video, 0 or more: correct it"),
        ({"video_end": "00:02"}, "its video_end is '00:02', expected seconds of the video, 0 or more"),
        ({"video_start": True}, "its video_start is True, expected seconds of the video"),
        ({"video_start": 2, "video_end": 1.5}, "its video_end, second 1.5, is not after its video_start, second"),
        ({"video_end": 0}, "its video_end, second 0, is not after its video_start, second 0: correct them"),
        ({"video_start": 3}, "a video of 30 frames, 10 a second, has none from second 3 to its end: change video_sta"),
        ({"video_start": 1.01, "video_end": 1.09}, "30 frames, 10 a second, has none from second 1.01 to 1.09: chan"),
    ):
        row = of_a_video({"type": "video_url", "video_url": {"url": "clip.mp4", **said}})
        with pytest.raises(DataError, match=re.escape(message)) as caught:
            convert([write(tmp_path / "rows.jsonl", json_lines([row]))], str(tmp_path / "out"), num_workers=1)
        assert "rows.jsonl:1: video 'clip.mp4': " in str(caught.value)


def flipped_everywhere(data: bytes) -> bytes:
    """Flip bytes all over: encoders make other bytes in each process, and a decoder does not read every one."""
    for tenth in (2, 3, 4, 5):  # before the list of frames
        data = flipped(data, share=tenth / 10)
    return data


DAMAGED = {
    "cut.jpg": ("image", noisy("JPEG")[:-400], "image file is truncated"),
    "flipped.png": ("image", flipped(noisy("PNG")), "it cannot be decoded"),
    "flipped.mp4": ("video", flipped_everywhere(video_bytes(num_frames=60)), "it cannot be decoded|is damaged"),
    "cut.wav": ("audio", wav_bytes(num_samples=99)[:-30], "it is cut short, with fewer bytes than in its header"),
}


def test_media_that_are_broken_behind_their_header_are_found_where_all_is_decoded(tmp_path: Path) -> None:
    good, damaged = MEDIA["photo.jpg"], {name: (kind, data) for name, (kind, data, _) in DAMAGED.items()}
    source = written(tmp_path / "data", {"good.jpg": good, **damaged})
    assert convert([source], str(tmp_path / "header"), num_workers=1).num_rows == 1 + len(DAMAGED)
    asked = ("--check-media", "decode", "--workers", "1")
    result = run_cli("convert", str(source), str(tmp_path / "fails"), *asked)
    assert result.returncode == 1
    assert "rows.jsonl:2: image 'cut.jpg': it cannot be decoded (OSError('image file is truncated" in result.stderr
    assert "repair or remove it (or pass --on-error skip to leave such rows out)" in result.stderr
    result = run_cli("convert", str(source), str(tmp_path / "out"), *asked, "--on-error", "skip")
    assert result.returncode == 0, result.stderr
    rejects = [json.loads(line) for line in (tmp_path / "out" / "_lmms" / "rejects.jsonl").read_bytes().splitlines()]
    assert [reject["row"] for reject in rejects] == [2, 3, 4, 5]
    for (name, (_, _, reason)), reject in zip(DAMAGED.items(), rejects, strict=True):
        assert name in reject["reason"]
        assert any(each in reject["reason"] for each in reason.split("|"))
    assert [data for _, data in stored_parts(tmp_path / "out")] == [good[1]]


def test_a_video_that_is_cut_short_or_has_no_frames_is_refused_by_its_header(tmp_path: Path) -> None:
    media = {
        "cut.mp4": ("video", moov_first(video_bytes())[:-900]),
        "empty.mp4": ("video", empty_moov()),
        "sound.mp4": ("video", sound_bytes("mp4")),
        "good.mp4": MEDIA["clip.mp4"],
    }
    source = written(tmp_path / "data", media)
    assert convert([source], str(tmp_path / "out"), on_error="skip", num_workers=1).num_rejected == 3
    errors = [
        json.loads(line)["reason"] for line in (tmp_path / "out" / "_lmms" / "rejects.jsonl").read_bytes().splitlines()
    ]
    assert "video 'cut.mp4': it is cut short: of its 30 frames" in errors[0]
    assert "video 'empty.mp4': it has no frames: remove it" in errors[1]
    assert "video 'sound.mp4': it has no video in a known codec: remove it, or write it with another" in errors[2]


def test_a_missing_library_ends_a_conversion_of_videos_by_name_and_not_one_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    images = written(tmp_path / "images", {"photo.jpg": MEDIA["photo.jpg"], "talk.wav": MEDIA["talk.wav"]})
    assert convert([images], str(tmp_path / "out"), num_workers=1).num_rows == 2
    videos = written(tmp_path / "videos", {"clip.mp4": MEDIA["clip.mp4"]})
    with pytest.raises(ConfigError, match=r'PyAV, which is missing: pip install "lmms-stream\[media\]"'):
        convert([videos], str(tmp_path / "videos-out"), num_workers=1, on_error="skip")
    assert not (tmp_path / "videos-out" / "index.json").exists()


def test_how_media_are_checked_is_one_of_two_ways() -> None:
    with pytest.raises(ConfigError, match="check_media must be 'header' or 'decode', got 'all'"):
        SchemaOptions(check_media="all")  # type: ignore[arg-type]


def test_a_conversion_begun_before_facts_were_stored_is_refused_by_name(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(200)]
    media = {name: ("image", image_bytes(color=number)) for number, name in enumerate(names)}
    source = written(tmp_path / "data", media | {"text.png": ("image", b"not an image")})
    options: dict[str, Any] = {"unit_bytes": 2000, "work": tmp_path / "work", "num_workers": 1}
    with pytest.raises(DataError, match="--on-error skip"):
        convert([source], str(tmp_path / "out"), **options)
    (about,) = (tmp_path / "work").rglob("conversion.json")
    conversion = json.loads(about.read_bytes())
    del conversion["asked"]["rows"], conversion["asked"]["schema"]["check_media"]
    about.write_text(json.dumps(conversion))
    message = "of another release, which stored rows differently: run the command with that release, or pass"
    with pytest.raises(StorageError, match=message):
        convert([source], str(tmp_path / "out"), on_error="skip", **options)
    assert convert([source], str(tmp_path / "out"), on_error="skip", overwrite=True, **options).num_rows == 200


def write_parts(folder: Path, *parts: tuple[dict[str, Any], bytes]) -> str:
    with MDSWriter(columns={"messages": "str", "media": "bytes"}, out=str(folder), hashes=["xxh3_64"]) as writer:
        for part, data in parts:
            message = {"role": "user", "content": [part | {"span": [0, len(data)]}]}
            writer.write({"messages": json.dumps([message]), "media": data})
    return str(folder)


def test_a_deep_check_finds_facts_that_are_not_those_of_the_bytes(tmp_path: Path) -> None:
    image = {"type": "image", "mime": "image/png"}
    remote = write_parts(
        tmp_path,
        (image | {"width": 4, "height": 3}, image_bytes()),
        (image | {"width": 3, "height": 4}, image_bytes()),
        (image | {"width": 0, "height": 4}, image_bytes()),
        (image, image_bytes()),
    )
    found = [f"{problem.where} {problem.what}" for problem in verify_dataset(remote, deep=True, num_workers=1).problems]
    assert found == [
        "sample 1 (number 1 of shard.00000.mds) a part of type 'image' says ImageFacts(width=3, height=4), its media "
        "have ImageFacts(width=4, height=3): convert the dataset again",
        "sample 2 (number 2 of shard.00000.mds) a part of type 'image' has the width 0, expected a whole number above "
        "0: convert the dataset again",
    ]
    assert verify_dataset(remote).problems == ()


def test_facts_are_shown_beside_the_media(tmp_path: Path) -> None:
    source = written(tmp_path / "data", MEDIA)
    convert([source], str(tmp_path / "out"), num_workers=1)
    labels = [sample.media[0].label for sample in inspect_dataset(str(tmp_path / "out"), num_samples=6).samples]
    assert labels[0].startswith("image/jpeg, ")
    assert labels[0].endswith(" bytes, 40 x 60")
    assert labels[2].endswith(" bytes, 48 x 64, 30 frames at 10 a second")
    assert labels[5].endswith(" bytes, 10,000 samples at 16,000 Hz")
    result = run_cli("inspect", str(tmp_path / "out"), "-i", "3", "--json")
    (media,) = json.loads(result.stdout)["samples"][0]["media"]
    assert media["facts"] == FACTS["clip.mkv"]
    assert "17 frames at 25 a second" in run_cli("inspect", str(tmp_path / "out"), "-i", "3").stdout


def test_an_image_stored_without_facts_is_shown_as_it_is_turned(tmp_path: Path) -> None:
    data = turned("JPEG", 8, size=(60, 40))
    remote = write_parts(tmp_path, ({"type": "image", "mime": "image/jpeg"}, data))
    (sample,) = inspect_dataset(remote).samples
    assert (sample.media[0].width, sample.media[0].height, dict(sample.media[0].facts)) == (40, 60, {})
