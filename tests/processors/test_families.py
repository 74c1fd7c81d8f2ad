"""Counts, frames and positions of the families are those of transformers, whose own code is asked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors.families.family import Family
from lmms_stream.processors.families.files import read_files
from lmms_stream.processors.families.qwen3_vl import Qwen3VL
from lmms_stream.processors.families.qwen_vl import fitting
from lmms_stream.processors.families.registry import family_of
from lmms_stream.processors.families.settings import MediaSettings
from lmms_stream.processors.families.vision import (
    FrameChoice,
    Vision,
    check_decoded,
    ends_and_between,
    starts_of_equal_parts,
)
from lmms_stream.processors.media.facts import ImageFacts, VideoFacts
from lmms_stream.versions.transformers import CUTS_SECONDS_OF_FRAMES
from transformers import AutoTokenizer, Qwen2_5_VLModel, Qwen2VLModel, Qwen3VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl import video_processing_qwen3_vl
from transformers.video_utils import VideoMetadata

from tests.processors.tiny_vlm import FAMILIES, save_processor, tiny_config
from tests.rounds import rounds
from tests.versions import IS_5

MODELS: dict[str, Any] = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}
sizes = st.tuples(st.integers(1, 3000), st.integers(1, 3000))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A processor's folder of each family."""
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, folder in made.items():
        save_processor(folder, name)
    return made


def family_in(folder: Path, **settings: Any) -> Family:
    files = read_files(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return family_of(files).of(files, MediaSettings(**settings), tokenizer.convert_tokens_to_ids)


@given(size=sizes, limits=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), patch_size=st.sampled_from((14, 16)))
def test_images_get_the_size_that_transformers_gives_them(
    size: tuple[int, int], limits: tuple[int, int], patch_size: int
) -> None:
    vision = Vision.of({"min_pixels": min(limits), "max_pixels": max(limits), "patch_size": patch_size}, name="")
    try:
        expected = smart_resize(*size, factor=2 * patch_size, min_pixels=min(limits), max_pixels=max(limits))
    except ValueError:
        with pytest.raises(DataError, match="one side may be at most 200 times the other: cut or remove it"):
            fitting(*size, vision)
    else:
        assert fitting(*size, vision) == expected


@given(size=st.tuples(st.integers(32, 2000), st.integers(32, 2000)), num_frames=st.integers(2, 800))
def test_frames_of_qwen3_vl_get_the_size_that_transformers_gives_them(size: tuple[int, int], num_frames: int) -> None:
    videos = Vision.of({"min_pixels": 4096, "max_pixels": 768 * 32 * 32, "patch_size": 16}, name="")
    choice = FrameChoice(fps=2.0, frame_num=num_frames, min_frames=4, max_frames=800)
    family = Qwen3VL(images=videos, videos=videos, choice=choice, image_token_id=0, video_token_id=1)
    height, width = size
    expected = video_processing_qwen3_vl.smart_resize(
        num_frames, height, width, factor=32, min_pixels=videos.min_pixels, max_pixels=videos.max_pixels
    )
    layout = family.layout("video", VideoFacts(width, height, num_frames, 10.0))
    assert (layout.shape.height, layout.shape.width) == expected
    assert sum(layout.counts) == -(-num_frames // 2) * expected[0] * expected[1] // 32**2
    assert layout.patches == 4 * sum(layout.counts)
    limited = replace(family, frame_max_pixels=50176)
    of_all = min(videos.max_pixels, max(videos.min_pixels, max(num_frames, 2) * 50176))
    expected = video_processing_qwen3_vl.smart_resize(
        num_frames, height, width, factor=32, min_pixels=videos.min_pixels, max_pixels=of_all
    )
    shape = limited.layout("video", VideoFacts(width, height, num_frames, 10.0)).shape
    assert (shape.height, shape.width) == expected
    assert limited.description["frame_max_pixels"] == 50176
    assert "frame_max_pixels" not in family.description


@given(total=st.integers(2, 5000), fps=st.sampled_from((1.0, 10.0, 23.976, 24.0, 29.97, 30.0, 60.0)))
def test_frames_are_as_many_as_transformers_takes(total: int, fps: float) -> None:
    metadata = VideoMetadata(total_num_frames=total, fps=fps)
    choice = FrameChoice(fps=2.0, frame_num=None, min_frames=4, max_frames=768)
    section = choice.section(VideoFacts(64, 64, total, fps))
    theirs = video_processing_qwen3_vl.Qwen3VLVideoProcessor().sample_frames(metadata)
    ours = ends_and_between(section, choice.num_frames(section))
    # Floating-point numbers make 388.5 a little more or less; ours take the even one.
    last = len(ours) - 1
    is_half = 2 * np.arange(len(ours)) * (total - 1) % (2 * last) == last
    assert np.array_equal(np.array(ours)[~is_half], theirs[~is_half])
    assert np.abs(np.array(ours) - theirs).max() <= 1
    num_pairs = choice.num_frames(section) // 2
    theirs = Qwen2VLVideoProcessor().sample_frames(metadata, fps=2.0)
    ours = starts_of_equal_parts(section, 2 * num_pairs)
    # Steps of floating-point numbers add up to one frame more, or to the frame before, now and then.
    assert len(ours) in (len(theirs), len(theirs) - 1)
    assert np.abs(np.array(ours) - theirs[: len(ours)].numpy()).max() <= 1
    assert ours[-1] < total


def test_the_fourteenth_of_seventeen_frames_is_a_frame() -> None:
    section = FrameChoice(fps=2.0, frame_num=14, min_frames=4, max_frames=768).section(VideoFacts(64, 64, 17, 10.0))
    assert starts_of_equal_parts(section, 14) == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15)


@given(
    total=st.integers(1, 2000), fps=st.floats(1, 120), start=st.floats(0, 20), length=st.floats(0.001, 20),
    wanted=st.integers(1, 100),
)  # fmt: skip
def test_frames_ascend_within_their_section(total: int, fps: float, start: float, length: float, wanted: int) -> None:
    choice = FrameChoice(fps=2.0, frame_num=wanted, min_frames=4, max_frames=50, start=start, end=start + length)
    within = [number for number in range(total) if start * fps - 1e-6 <= number < (start + length) * fps - 1e-6]
    if not within:
        with pytest.raises(DataError, match="change video_start and video_end, or remove it"):
            choice.section(VideoFacts(64, 64, total, fps))
        return
    section = choice.section(VideoFacts(64, 64, total, fps))
    num_frames = choice.num_frames(section)
    assert 1 <= num_frames <= min(50, wanted, section.num_frames)
    for frames in (starts_of_equal_parts(section, num_frames), ends_and_between(section, num_frames)):
        assert len(frames) == num_frames
        assert sorted(set(frames)) == list(frames)
        assert set(frames) <= set(within)


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_are_those_of_the_models_own_code(name: str, folders: dict[str, Path]) -> None:
    config = tiny_config(name, folders[name])
    random = np.random.default_rng(11)
    for number in range(rounds(40, 1000)):
        family = family_in(folders[name], fps=float(random.choice([0.4, 1.0, 2.0])))
        kinds = [[], ["image"], ["video"], ["image"] * 3, ["video"] * 2, ["image", "video", "image"]][number % 6]
        layouts = [_random_layout(family, kind, random) for kind in kinds]
        input_ids = _tokens_of(layouts, config, random)
        ours = family.positions(input_ids, layouts)
        assert ours.dtype == np.int64
        assert np.array_equal(ours, _theirs(name, config, input_ids, layouts, family)), (number, kinds)


def _random_layout(family: Family, kind: str, random: np.random.Generator) -> Any:
    width, height = random.integers(32, 600, 2).tolist()
    if kind == "image":
        return family.layout(kind, ImageFacts(width, height))
    frames, fps = int(random.integers(1, 90)), float(random.choice([8.0, 12.5, 29.97]))
    return family.layout(kind, VideoFacts(width, height, frames, fps))


def _tokens_of(layouts: Any, config: Any, random: np.random.Generator) -> Any:
    def text() -> list[int]:
        return random.integers(10, 200, random.integers(0, 9)).tolist()  # type: ignore[no-any-return]

    ids = [1, *text()]
    for layout in layouts:
        pad = config.image_token_id if layout.kind == "image" else config.video_token_id
        for count in layout.counts:
            ids += [config.vision_start_token_id, *[pad] * count, config.vision_end_token_id, *text()]
    return np.array(ids)


def _theirs(name: str, config: Any, input_ids: Any, layouts: Any, family: Any) -> Any:
    grids = {
        f"{kind}_grid_thw": torch.tensor([each.shape.grid for each in layouts if each.kind == kind])
        for kind in ("image", "video")
        if any(each.kind == kind for each in layouts)
    }
    if name == "qwen2_5_vl" and "video_grid_thw" in grids:
        videos = [each.shape for each in layouts if each.kind == "video"]
        rates = [each.num_frames / (each.facts.frames / each.facts.fps) for each in videos]
        grids["second_per_grid_ts"] = torch.tensor([2 / rate for rate in rates])
    stub, ids = SimpleNamespace(config=config), torch.from_numpy(input_ids)[None]
    if IS_5:
        stub.get_vision_position_ids = partial(MODELS[name].get_vision_position_ids, stub)
        kinds = grids["mm_token_type_ids"] = (ids == config.image_token_id) + 2 * (ids == config.video_token_id)
    positions, _ = MODELS[name].get_rope_index(stub, ids, **grids)
    if IS_5:  # which lets text begin within a long video: each run is moved behind the largest position before it
        begin = 0
        for run in positions[:, 0].split(torch.unique_consecutive(kinds[0], return_counts=True)[1].tolist(), dim=1):
            run += begin - run.min()
            begin = int(run.max()) + 1
    return positions[:, 0].numpy()


def test_seconds_between_frames_are_cut_to_whole_numbers_where_the_model_does(folders: dict[str, Path]) -> None:
    steps = {}
    for fps in (0.3, 0.7, 1.0, 2.0):
        layout = family_in(folders["qwen2_5_vl"], fps=fps).layout("video", VideoFacts(64, 64, 400, 10.0))
        steps[fps] = layout.shape.steps
    if CUTS_SECONDS_OF_FRAMES:
        assert steps == {0.3: 12, 0.7: 4, 1.0: 4, 2.0: 2}  # tokens_per_second is 2; 2 / 0.7 seconds are 2
    else:
        assert steps == pytest.approx({0.3: 2 * 2 * 40 / 12, 0.7: 2 * 2 * 40 / 28, 1.0: 4, 2.0: 2})


def test_positions_of_a_model_follow_its_config(folders: dict[str, Path], tmp_path: Path) -> None:
    save_processor(tmp_path, "qwen2_5_vl")
    config = tiny_config("qwen2_5_vl", tmp_path)
    config.vision_config.tokens_per_second = 25
    config.save_pretrained(tmp_path)
    assert family_in(tmp_path).layout("video", VideoFacts(64, 64, 40, 10.0)).shape.steps == 25
    family_in(tmp_path).check_model(config.to_dict())
    with pytest.raises(
        ConfigError,
        match=r"the model has vision_config.tokens_per_second 25, and its processor 2: take the model's own",
    ):
        family_in(folders["qwen2_5_vl"]).check_model(config.to_dict())
    with pytest.raises(ConfigError, match=r"the model has vision_config.patch_size 16, and its processor 14"):
        family_in(folders["qwen2_vl"]).check_model({"vision_config": {"patch_size": 16}})


@pytest.mark.parametrize("name", FAMILIES)
def test_dummies_are_the_smallest_inputs_of_each_kind(name: str, folders: dict[str, Path]) -> None:
    family = family_in(folders[name])
    dummy = family.dummy()
    values = 3 * 2 * (16 if name == "qwen3_vl" else 14) ** 2
    assert set(dummy) == {"image", "video"}
    assert dummy["image"]["pixel_values"].shape == dummy["video"]["pixel_values_videos"].shape == (4, values)
    assert dummy["image"]["pixel_values"].dtype == np.float32
    assert dummy["image"]["image_grid_thw"].tolist() == dummy["video"]["video_grid_thw"].tolist() == [[1, 2, 2]]
    for kind, inputs in dummy.items():
        assert family.kinds_of(inputs) == {kind}
    assert family.kinds_of({}) == set()
    tower = tiny_config(name, folders[name]).model_type
    assert tower in family.model_types


def test_limits_of_the_folder_give_way_to_the_users(folders: dict[str, Path]) -> None:
    image = ImageFacts(3000, 2000)
    default = family_in(folders["qwen2_vl"]).layout("image", image)
    assert sum(default.counts) <= 64
    more = family_in(folders["qwen2_vl"], image_max_pixels=256 * 28 * 28).layout("image", image)
    assert 200 < sum(more.counts) <= 256
    fewer = family_in(folders["qwen2_vl"], image_max_pixels=2 * 28 * 28).layout("image", image)
    assert sum(fewer.counts) <= 2  # although the folder's lower limit is 4 tokens
    tiny = family_in(folders["qwen2_vl"], image_min_pixels=100 * 28 * 28).layout("image", ImageFacts(30, 30))
    assert sum(tiny.counts) == 100  # although the folder's upper limit is 64
    frames = family_in(folders["qwen2_vl"], video_max_pixels=4 * 28 * 28, frame_num=6)
    assert frames.layout("video", VideoFacts(500, 500, 60, 10.0)).counts == (12,)
    few = family_in(folders["qwen3_vl"], fps=10, video_max_frames=5, video_start=2, video_end=4)
    assert few.frames(few.layout("video", VideoFacts(500, 500, 60, 10.0))) == (20, 25, 30, 34, 39)
    assert few.frames(few.layout("image", image)) == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_of_media_is_followed_by_every_family(name: str, folders: dict[str, Path]) -> None:
    side = 32 if name == "qwen3_vl" else 28

    def tokens(kind: str, width: int, height: int, **settings: Any) -> int:
        facts = ImageFacts(width, height) if kind == "image" else VideoFacts(width, height, 80, 20.0)
        return sum(family_in(folders[name], **settings).layout(kind, facts).counts)

    def frames(**settings: Any) -> tuple[int, ...]:
        family = family_in(folders[name], **settings)
        return tuple(family.frames(family.layout("video", VideoFacts(64, 64, 80, 20.0))))

    large, small = (40 * side, 40 * side), (2 * side, 2 * side)
    assert tokens("image", *large, image_max_pixels=9 * side**2) == 9
    assert tokens("image", *small, image_min_pixels=25 * side**2) == 25
    together = 4 if name == "qwen3_vl" else 1  # whose limits are of all frames of a video; others' of each frame
    limit = 9 * together * side**2
    assert tokens("video", *large, video_max_pixels=limit, frame_num=4) == 9 * 2
    assert tokens("video", *small, video_min_pixels=25 * together * side**2, frame_num=4) == 25 * 2
    assert tokens("video", *small, frame_num=4) == 4 * 2
    assert len(frames(frame_num=6)) == 6
    assert len(frames(frame_num=6, video_max_frames=4)) == 4
    assert len(frames(fps=2.5)) == 10
    assert len(frames(fps=2.5, video_max_frames=8)) == 8
    assert set(frames(fps=4, video_start=1, video_end=3)) <= set(range(20, 60))
    assert len(frames(fps=4, video_start=1, video_end=3)) == 8


def test_settings_that_contradict_are_refused() -> None:
    for wrong, message in (
        ({"fps": 0}, r"processor\.fps must be above 0, got 0\.0"),
        ({"frame_num": 2.5}, r"processor\.frame_num must be a whole number, got 2\.5"),
        ({"image_max_pixels": 0}, r"processor\.image_max_pixels must be a whole number of at least 1, got 0"),
        (
            {"fps": 1.0, "frame_num": 4},
            r"processor\.fps 1\.0 and processor\.frame_num 4 both set .*: set only one of them",
        ),
        (
            {"image_min_pixels": 9, "image_max_pixels": 4},
            r"image_min_pixels 9 is more than processor\.image_max_pixels 4: make it smaller",
        ),
        (
            {"video_min_pixels": 9, "video_max_pixels": 4},
            r"video_min_pixels 9 is more than processor\.video_max_pixels 4: make it smaller",
        ),
        ({"video_min_pixels": 1.5}, r"processor\.video_min_pixels must be a whole number, got 1\.5"),
        ({"video_start": -1}, r"video_start -1\.0 and processor\.video_end None must be seconds of a video, 0 or"),
        (
            {"video_start": 3, "video_end": 3},
            r"video_start 3\.0 and processor\.video_end 3\.0 .* and the end must be after the start: correct",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            MediaSettings(**wrong)


def test_videos_that_a_family_cannot_read_are_named(folders: dict[str, Path]) -> None:
    with pytest.raises(
        DataError, match=r"a video of 10 frames, 10 a second, has none from second 2 to its end: change"
    ):
        family_in(folders["qwen2_vl"], video_start=2).layout("video", VideoFacts(64, 64, 10, 10.0))


def test_an_image_that_is_not_what_its_facts_say_is_refused() -> None:
    for shape in ((100, 51, 3), (50, 26, 3), (13, 7, 3)):
        check_decoded(shape, ImageFacts(51, 100))
    with pytest.raises(DataError, match="stored as of 51 x 100 pixels, and its bytes are of 100 x 51: convert"):
        check_decoded((51, 100, 3), ImageFacts(51, 100))


def test_folders_are_named_that_hold_no_known_processor(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no preprocessor_config\.json: name the folder or hub id"):
        read_files(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    with pytest.raises(
        ConfigError,
        match=r"processor .* cannot be loaded by the installed transformers \(.*\): install the packages that it",
    ):
        family_of(read_files(str(tmp_path))).of(read_files(str(tmp_path)), MediaSettings(), lambda token: 0)
    (tmp_path / "preprocessor_config.json").write_text('{"do_resize": false}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    files = read_files(str(tmp_path))
    with pytest.raises(ConfigError, match="has do_resize False, but only True is supported: save the processor again"):
        family_of(files).of(files, MediaSettings(), lambda token: 0)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read"):
        read_files(str(tmp_path))
    with pytest.raises(ConfigError, match="processor 'no/such/processor' cannot be loaded: it is not a folder,"):
        read_files("no/such/processor")
