"""What a processor of media makes is what transformers' own makes of the same chats, images and frames."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from lmms_stream import registry
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.base import IGNORED_LABEL, FactsMissingError, Measured, processor_fingerprint
from lmms_stream.processors.families.files import read_files
from lmms_stream.processors.multimodal import MultimodalProcessor
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers import AutoImageProcessor, AutoProcessor
from transformers.video_utils import VideoMetadata

from tests.processes import ENVIRONMENT
from tests.processors.tiny_vlm import FAMILIES, UNMARKED, film, picture, save_processor, stored
from tests.rounds import rounds

WORDS = ("What is this?)", " see: ", "a (chart", "\n", "42, é!", "<0.5 seconds>", "yes ")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in made.items():
        save_processor(folder, name)
    return made


@pytest.fixture(scope="module")
def processors(folders: dict[str, Path]) -> dict[str, MultimodalProcessor]:
    return {name: MultimodalProcessor.from_pretrained(str(folder)) for name, folder in folders.items()}


def parts_of(sample: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    messages = json.loads(sample["messages"])
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] == kind]


def bytes_of(sample: dict[str, Any], part: dict[str, Any]) -> bytes:
    offset, size = part["span"]
    data: bytes = sample["media"][offset : offset + size]
    return data


def frames_of(data: bytes) -> NDArray[np.uint8]:
    with av.open(BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def media_of(
    processor: MultimodalProcessor, sample: dict[str, Any]
) -> tuple[list[Any], list[NDArray[np.uint8]], list[VideoMetadata]]:
    """Images, and videos of the frames that ours chooses with their metadata, as transformers' processors take them."""
    images = [
        ImageOps.exif_transpose(Image.open(BytesIO(bytes_of(sample, part)))).convert("RGB")
        for part in parts_of(sample, "image")
    ]
    videos, metadata = [], []
    for part in parts_of(sample, "video"):
        frames = list(processor.family.frames(processor._layout(part, sample)))
        videos.append(frames_of(bytes_of(sample, part))[frames].transpose(0, 3, 1, 2))
        facts = {"total_num_frames": part["frames"], "fps": part["fps"], "duration": part["frames"] / part["fps"]}
        metadata.append(VideoMetadata(**facts, frames_indices=frames))
    return images, videos, metadata


@lru_cache(maxsize=16)
def loaded(folder: str) -> Any:
    """transformers' processor of a folder, which takes a tenth of a second to load; tests do not change it."""
    return AutoProcessor.from_pretrained(folder)


def theirs(folder: Path, processor: MultimodalProcessor, sample: dict[str, Any]) -> dict[str, Any]:
    """What transformers' processor makes of a sample, given the frames of videos that ours chooses."""
    processor_of_theirs = loaded(str(folder))
    text = processor_of_theirs.apply_chat_template(json.loads(sample["messages"]), tokenize=False)
    if getattr(processor.family, "name", "") == "Qwen3-VL":  # since 5.10 theirs leaves these around what it writes
        text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    images, videos, metadata = media_of(processor, sample)
    of_videos = {"videos": videos, "video_metadata": metadata, "do_sample_frames": False} if videos else {}
    made = processor_of_theirs(text=[text], images=images or None, **of_videos, return_tensors="pt")
    return {name: value.numpy() for name, value in made.items() if hasattr(value, "numpy")}


def random_chat(
    random: np.random.Generator,
    kinds: Sequence[str] = ("image", "video"),
    *,
    forms: Sequence[str] = ("PNG", "JPEG", "WEBP"),
) -> dict[str, Any]:
    """Chats of one to three turns; media of any sides and orientations stand among texts."""
    turns: list[tuple[str, Any]] = []
    for _ in range(random.integers(1, 4)):
        content: list[Any] = []
        for _ in range(random.integers(0, 4)):
            width, height = random.integers(8, 260, 2).tolist()
            seed = int(random.integers(1000))
            if "image" in kinds and random.random() < 0.6:
                form, orientation = str(random.choice(forms)), int(random.integers(1, 9))
                content.append(("image", picture(width, height, seed=seed, format=form, orientation=orientation)))
            elif "video" in kinds and random.random() < 0.5:
                fps = Fraction(str(random.choice(["5", "8", "30000/1001", "12.5"])))
                sides = 32 + 2 * (width // 4), 32 + 2 * (height // 4)
                content.append(("video", film(*sides, num_frames=int(random.integers(1, 40)), fps=fps, seed=seed)))
            content.append(str(random.choice(WORDS)))
        turns += [("user", content), ("assistant", str(random.choice(WORDS)) + "end")]
    return stored(*turns)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_tensors_are_those_of_transformers_processor(
    name: str, folders: dict[str, Path], processors: dict[str, MultimodalProcessor]
) -> None:
    random = np.random.default_rng(2)  # whose first samples have videos
    processor = processors[name]
    for number in range(rounds(4, 40)):
        sample = random_chat(random)
        if any(part["frames"] < 2 for part in parts_of(sample, "video")):
            continue  # transformers reads no video of one frame
        ours, expected = processor.process(sample), theirs(folders[name], processor, sample)
        assert np.array_equal(ours["input_ids"], expected["input_ids"][0]), number
        tensors = expected.keys() - {"input_ids", "attention_mask", "second_per_grid_ts", "mm_token_type_ids"}
        assert ours["media"].keys() == tensors
        for key in tensors:
            assert ours["media"][key].shape == expected[key].shape, key
            assert ours["media"][key].dtype == expected[key].dtype, key
            difference = np.abs(ours["media"][key] - expected[key])
            # Theirs resamples by torchvision and ours as Pillow: now and then a value differs by one or two of 255.
            assert difference.max() <= (0 if key.endswith("thw") else 2.01 / 255 / 0.26), key
            assert difference.mean() <= 0.005, key


def test_what_is_measured_is_what_is_processed(processors: dict[str, MultimodalProcessor]) -> None:
    random = np.random.default_rng(5)
    for number in range(rounds(15, 300)):
        processor = processors[FAMILIES[number % 3]]
        sample = random_chat(random)
        processed = processor.process(sample)
        (measured,) = processor.measure_media([{"messages": sample["messages"]}])
        assert isinstance(measured, Measured)
        assert measured.tokens == processor.measure(sample) == len(processed["input_ids"])
        assert processed["position_ids"].shape == (3, measured.tokens)
        tokens = {
            kind: int((processed["input_ids"] == processor.tokenizer.token_id(token)).sum())
            for kind, token in processor.family.placeholders.items()
        }
        assert (measured.image_tokens, measured.video_tokens) == (tokens["image"], tokens["video"])
        pixels = [value for key, value in processed["media"].items() if key.startswith("pixel")]
        assert measured.patches == sum(map(len, pixels)) == 4 * sum(tokens.values())
        for token in tokens:
            learnt = processed["labels"][processed["labels"] != IGNORED_LABEL]
            assert processor.tokenizer.token_id(processor.family.placeholders[token]) not in learnt


def test_parts_without_facts_are_measured_from_their_bytes(processors: dict[str, MultimodalProcessor]) -> None:
    turns = ("user", [("image", picture(90, 60, format="JPEG", orientation=6)), ("video", film(64, 64, num_frames=7))])
    with_facts, without = (stored(turns, ("assistant", "x"), with_facts=each) for each in (True, False))
    for processor in processors.values():
        assert processor.measure_media([without]) == processor.measure_media([with_facts])
        ours, others = processor.process(without), processor.process(with_facts)
        assert np.array_equal(ours["input_ids"], others["input_ids"])
        (missing,) = processor.measure_media([{"messages": without["messages"]}])
        assert isinstance(missing, FactsMissingError)
        assert "stored without its size, and measuring was given no media" in str(missing)


def learnt_text(processor: MultimodalProcessor, sample: dict[str, Any]) -> str:
    processed = processor.process(sample)
    learnt = processed["labels"] != IGNORED_LABEL
    assert np.array_equal(processed["labels"][learnt], processed["input_ids"][learnt])
    return processor.tokenizer.decode(processed["labels"][learnt].tolist())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("marked", [True, False])
def test_what_the_assistant_says_is_learnt_and_its_media_are_not(
    name: str, marked: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[name]
    if not marked:
        save_processor(tmp_path, name, template=UNMARKED)
        folder = tmp_path
    image, video = ("image", picture(70, 50)), ("video", film(64, 48, num_frames=9))
    sample = stored(
        ("user", ["Look: ", image, image, " and)", video, "What?"]),
        ("assistant", ["The (first", video, "is ", image, "it."]),
        ("user", [video]),
        ("assistant", "No, é."),
    )
    processor = MultimodalProcessor.from_pretrained(str(folder))
    assert learnt_text(processor, sample) == "The (firstis it.<|im_end|>No, é.<|im_end|>"
    last = MultimodalProcessor.from_pretrained(str(folder), learn="last")
    assert learnt_text(last, sample) == "No, é.<|im_end|>"
    assert processor_fingerprint(last) == processor_fingerprint(processor)
    messages = json.loads(sample["messages"])
    messages[3]["learn"] = False
    assert learnt_text(processor, {**sample, "messages": json.dumps(messages)}) == "The (firstis it.<|im_end|>"


def test_tools_and_texts_alone_are_rendered_as_for_texts(processors: dict[str, MultimodalProcessor]) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    sample = stored(("user", "look"), ("assistant", "done"), tools=tools)
    processed = processors["qwen2_5_vl"].process(sample)
    assert processed["media"] == {}
    assert np.array_equal(processed["position_ids"], [np.arange(len(processed["input_ids"]))] * 3)
    text = processors["qwen2_5_vl"].tokenizer.decode(processed["input_ids"].tolist())
    assert text.startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "look", "parameters": {}}}]')


def test_placeholders_and_media_that_do_not_match_are_named(
    processors: dict[str, MultimodalProcessor], tmp_path: Path
) -> None:
    for processor in processors.values():
        written = stored(("user", ["a <|image_pad|> b", ("image", picture(60, 60))]), ("assistant", "x"))
        alone = stored(("user", "<|video_pad|>"), ("assistant", "x"))
        for make in (processor.measure, processor.process):
            with pytest.raises(
                DataError, match=r"has <\|image_pad\|> 2 times, and it has 1 media of type image: remove"
            ):
                make(written)
            with pytest.raises(
                DataError, match=r"has <\|video_pad\|> 1 times, and it has 0 media of type video: remove"
            ):
                make(alone)
    save_processor(tmp_path, template="{% for message in messages %}{{ message.role }}{% endfor %}")
    silent = MultimodalProcessor.from_pretrained(str(tmp_path))
    for make in (silent.measure, silent.process):
        with pytest.raises(
            DataError, match=r"template writes <\|image_pad\|> 0 times for a sample with 1 media of type image"
        ):
            make(stored(("user", [("image", picture(60, 60))]), ("assistant", "x")))


def test_kinds_that_a_family_cannot_read_are_named(processors: dict[str, MultimodalProcessor]) -> None:
    part = {"type": "audio", "span": [0, 4], "samples": 16000, "rate": 16000}
    sample = {"messages": json.dumps([{"role": "user", "content": [part]}]), "media": b"RIFF"}
    with pytest.raises(
        DataError, match=r"holds media of type audio, and .* reads image and video: take a processor of"
    ):
        processors["qwen2_vl"].measure(sample)


def test_an_error_of_one_sample_is_that_samples_alone(processors: dict[str, MultimodalProcessor]) -> None:
    good = stored(("user", [("image", picture(60, 60))]), ("assistant", "x"))
    bad = stored(("user", "<|image_pad|>"), ("assistant", "x"))
    first, error, last = processors["qwen3_vl"].measure_media([good, bad, good])
    assert isinstance(error, DataError)
    assert isinstance(first, Measured)
    assert first == last


def test_a_tokenizer_without_the_familys_tokens_is_refused(processors: dict[str, MultimodalProcessor]) -> None:
    class Other(type(processors["qwen2_vl"].family)):  # type: ignore[misc]
        media_tokens = ("<|nothing|>",)

    family = processors["qwen2_vl"].family
    with pytest.raises(ConfigError, match=r"does not have <\|nothing\|> as one token, the placeholder of media in"):
        MultimodalProcessor(processors["qwen2_vl"].tokenizer, Other(**vars(family)))


def test_settings_change_the_fingerprint_and_unknown_ones_are_refused(folders: dict[str, Path]) -> None:
    folder = str(folders["qwen2_5_vl"])
    settings: list[dict[str, Any]] = [{}, {"image_max_pixels": 5000}, {"fps": 1.0}, {"frame_num": 8}, {"video_end": 9}]
    prints = {processor_fingerprint(MultimodalProcessor.from_pretrained(folder, **each)) for each in settings}
    assert len(prints) == len(settings)
    whole = MultimodalProcessor.from_pretrained(folder, fps=1, video_end=9)
    same = MultimodalProcessor.from_pretrained(folder, fps=1.0, video_end=9.0)
    assert processor_fingerprint(whole) == processor_fingerprint(same)
    with pytest.raises(ConfigError, match="has no setting 'image_max_pixel': did you mean 'image_max_pixels'"):
        MultimodalProcessor.from_pretrained(folder, image_max_pixel=5)
    with pytest.raises(ConfigError, match=r"processor\.learn must be all or last, got 'first'"):
        MultimodalProcessor.from_pretrained(folder, learn="first")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_seconds_that_a_video_itself_says_win_over_the_settings(name: str, folders: dict[str, Path]) -> None:
    plain = MultimodalProcessor.from_pretrained(str(folders[name]), fps=4)
    processor = MultimodalProcessor.from_pretrained(str(folders[name]), fps=4, video_start=1, video_end=2)
    sample = stored(("user", [("video", film(64, 48, num_frames=40))]), ("assistant", "yes"))

    def saying(**said: Any) -> dict[str, Any]:
        messages = json.loads(sample["messages"])
        messages[0]["content"][0] |= said
        return {**sample, "messages": json.dumps(messages)}

    for said, frames in (({}, range(10, 20)), ({"video_end": 1.2}, range(12)), ({"video_start": 3}, range(30, 40))):
        own = saying(**said)
        (seen,) = processor.see_media(own)
        assert set(seen.frames) <= set(frames)
        assert len(seen.frames) == 4
        processed = processor.process(own)
        measured = processor.measure_media([{"messages": own["messages"]}])[0]
        assert isinstance(measured, Measured)
        assert measured.tokens == len(processed["input_ids"])
        assert measured.patches == len(processed["media"]["pixel_values_videos"])
        if said:  # then the settings' seconds count for nothing
            expected = plain.process(own)
            assert np.array_equal(processed["position_ids"], expected["position_ids"])
            for key in expected["media"]:
                assert np.array_equal(processed["media"][key], expected["media"][key])
    for wrong, message in (
        ({"video_start": 4}, "has none from second 4 to its end: change video_start and video_end, or remove it"),
        ({"video_start": "a"}, "its video_start is 'a', expected seconds of the video, 0 or more: correct it"),
    ):
        with pytest.raises(DataError, match=message):
            processor.measure(saying(**wrong))
        with pytest.raises(DataError, match=message):
            processor.process(saying(**wrong))


def test_older_folders_and_nested_settings_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    processor = MultimodalProcessor.from_pretrained(str(folders["qwen2_vl"]))
    save_processor(tmp_path, "qwen2_vl")
    template = tmp_path / "chat_template.jinja"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    assert MultimodalProcessor.from_pretrained(str(tmp_path)).description == processor.description
    files = {"image": tmp_path / "preprocessor_config.json", "video": tmp_path / "video_preprocessor_config.json"}
    whole = tmp_path / "processor_config.json"
    said = read_files(str(tmp_path))
    for kind, file in files.items():  # as transformers 4 writes them
        file.write_text(json.dumps({**getattr(said, kind), "processor_class": "Qwen2VLProcessor"}))
    whole.unlink(missing_ok=True)
    assert MultimodalProcessor.from_pretrained(str(tmp_path)).description == processor.description
    nested = {f"{kind}_processor": json.loads(file.read_text()) for kind, file in files.items()}
    for file in files.values():  # as transformers 5 writes them
        file.unlink()
    whole.write_text(json.dumps({"processor_class": "Qwen2VLProcessor", **nested}))
    assert MultimodalProcessor.from_pretrained(str(tmp_path)).description == processor.description


def test_of_settings_that_two_files_say_those_that_transformers_takes_are_followed(tmp_path: Path) -> None:
    save_processor(tmp_path, "qwen2_vl")
    said = dict(read_files(str(tmp_path)).image)
    for name, patch_size in (("preprocessor_config.json", 7), ("processor_config.json", 16)):
        changed = {**said, "patch_size": patch_size}
        values = {"image_processor": changed} if name == "processor_config.json" else changed
        (tmp_path / name).write_text(json.dumps({"processor_class": "Qwen2VLProcessor", **values}))
    theirs = AutoImageProcessor.from_pretrained(tmp_path)
    assert read_files(str(tmp_path)).image["patch_size"] == theirs.patch_size


SCRIPT = """
import json, pickle, sys
from lmms_stream import MultimodalProcessor
sample = pickle.load(open(sys.argv[2], "rb"))
processor = MultimodalProcessor.from_pretrained(sys.argv[1])
again = pickle.loads(pickle.dumps(processor))
assert processor.measure(sample) == len(again.process(sample)["input_ids"]) > 20
assert "torch" not in sys.modules, "torch"
assert not [name for name in sys.modules if name.startswith("transformers")]
assert processor.description == again.description
print(json.dumps(again.process(sample)["position_ids"].tolist()))
"""


def test_a_process_without_torch_measures_and_processes_from_a_hub_id(
    folders: dict[str, Path], processors: dict[str, MultimodalProcessor], tmp_path: Path
) -> None:
    sample = stored(
        ("user", [("image", picture(90, 60)), "?", ("video", film(64, 64, num_frames=9))]), ("assistant", "x")
    )
    (tmp_path / "sample").write_bytes(pickle.dumps(sample))
    repository = tmp_path / "hub" / "models--maker--tiny-vl"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    (repository / "snapshots").mkdir()
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folders["qwen3_vl"], snapshot)
    (snapshot / "config.json").write_text('{"model_type": "qwen3_vl"}')  # which repositories of processors have, too
    script = [sys.executable, "-c", SCRIPT, "maker/tiny-vl", str(tmp_path / "sample")]
    environment = {**os.environ, **ENVIRONMENT, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    result = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    (compared,) = (tmp_path / "cache" / "lmms_stream" / "processors").iterdir()  # by another process
    assert json.loads(compared.read_text())["result"] == {}
    assert json.loads(result.stdout) == processors["qwen3_vl"].process(sample)["position_ids"].tolist()


FAMILY_OF_THE_TEST = '''
"""One token for each 10 pixels of an image's width; no positions of its own."""
import numpy as np
from dataclasses import dataclass
from lmms_stream.processors.families.family import Layout

@dataclass(frozen=True)
class Strips:
    strip: int
    model_types = ("strips",)
    processor_classes = ("StripsProcessor",)
    num_axes = 0
    tower = "strips"
    attentions = ("sdpa",)
    placeholders = {"image": "<|image_pad|>"}
    surroundings = ("<|vision_start|>", "<|vision_end|>")
    media_tokens = ("<|image_pad|>",)

    @staticmethod
    def of(files, settings, token_ids):
        return Strips(files.image["strip"])

    @property
    def description(self):
        return {"family": "strips", "strip": self.strip}

    def layout(self, kind, facts):
        count = -(-facts.width // self.strip)
        return Layout(kind, (count, 1), count, "<|vision_start|><|image_pad|>(<|image_pad|>)", facts)

    def positions(self, input_ids, layouts):
        raise AssertionError("a family of no axes is not asked for positions")

    def tensors(self, layouts, media, memory):
        return {"strips": np.concatenate([np.full(each.patches, len(data)) for each, data in zip(layouts, media)])}

FAMILY = Strips
'''


def test_a_package_adds_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_processor(tmp_path / "folder")
    settings = {"processor_class": "StripsProcessor", "strip": 10}
    (tmp_path / "folder" / "preprocessor_config.json").write_text(json.dumps(settings))
    for name in ("video_preprocessor_config.json", "processor_config.json"):
        (tmp_path / "folder" / name).unlink(missing_ok=True)
    (tmp_path / "site" / "strips-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "strips_of_a_test.py").write_text(FAMILY_OF_THE_TEST)
    entry = "[lmms_stream.families]\nStripsProcessor = strips_of_a_test:FAMILY\n"
    (tmp_path / "site" / "strips-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "site" / "strips-1.0.dist-info" / "METADATA").write_text("Name: strips\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    registry._entry_points.cache_clear()
    processor = MultimodalProcessor.from_pretrained(str(tmp_path / "folder"))
    data = picture(55, 20)
    sample = stored(("user", ["a", ("image", data), "b"]), ("assistant", "c"))
    processed = processor.process(sample)
    assert "position_ids" not in processed
    assert processed["media"]["strips"].tolist() == [len(data)] * 6
    text = processor.tokenizer.decode(processed["input_ids"].tolist())
    assert "a<|vision_start|>" + "<|image_pad|>" * 6 + "(<|image_pad|>)b<|im_end|>" in text
    assert processor.measure_media([sample]) == [Measured(len(processed["input_ids"]), 6, 7)]
    assert learnt_text(processor, sample) == "c<|im_end|>"
    assert pickle.loads(pickle.dumps(processor)).measure(sample) == processor.measure(sample)
    sys.modules.pop("strips_of_a_test")
    registry._entry_points.cache_clear()
