"""Facts as parts are stored with them, and what is needed to have them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.media.facts import AudioFacts, ImageFacts, VideoFacts, facts_of, stored_facts

from ...converters.media_files import image_bytes, wav_bytes
from .clips import sound_bytes, video_bytes


def test_a_library_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    media = (("video", video_bytes()), ("audio", sound_bytes("mp3")))
    monkeypatch.setitem(sys.modules, "av", None)
    for kind, data in media:
        with pytest.raises(ConfigError, match=r'decoded by PyAV, which is missing: pip install "lmms-stream\[media\]"'):
            facts_of(data, kind)
    assert facts_of(wav_bytes(), "audio") == AudioFacts(8, 16000)
    assert facts_of(image_bytes(), "image") == ImageFacts(4, 3)


def test_facts_come_back_from_what_is_stored() -> None:
    for facts, kind in ((ImageFacts(6, 4), "image"), (VideoFacts(64, 48, 30, 30000 / 1001), "video")):
        part = json.loads(json.dumps({"type": kind, "mime": "", "span": [0, 1], **facts._asdict()}))
        assert stored_facts(part) == facts
        assert type(stored_facts(part)) is type(facts)
    assert stored_facts({"type": "audio", "samples": 1, "rate": 8000}) == AudioFacts(1, 8000)


def test_parts_without_facts_have_none() -> None:
    assert stored_facts({"type": "image", "span": [0, 4]}) is None
    assert stored_facts({"type": "video", "fps": 2.0, "width": 3, "height": 4}) is None
    assert stored_facts({"type": "smell", "width": 3, "height": 4}) is None


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "4", None, float("nan"), float("inf"), [4]])
def test_facts_that_are_no_numbers_above_0_are_refused(value: Any) -> None:
    with pytest.raises(
        DataError, match=r"has the width .*, expected a whole number above 0: convert the dataset again"
    ):
        stored_facts({"type": "image", "width": value, "height": 3})
    if type(value) is not float or value != 1.0:
        part = {"type": "video", "width": 1, "height": 1, "frames": 1, "fps": value}
        with pytest.raises(DataError, match=r"has the fps .*, expected a number above 0: convert the dataset again"):
            stored_facts(part)


def test_media_of_no_kind_are_a_wrong_call() -> None:
    with pytest.raises(ConfigError, match="media of kind 'smell' have no facts: choose one of image, video, audio"):
        facts_of(b"", "smell")


def test_facts_of_images_load_neither_video_libraries_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes())
    code = (
        "import sys; from lmms_stream.processors.media.facts import facts_of; "
        "facts_of(open(sys.argv[1], 'rb').read(), 'image'); "
        "sys.exit(' '.join({'av', 'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "a.png")], check=True, timeout=60)
