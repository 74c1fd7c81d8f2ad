"""Patches: bit for bit those of transformers' slow Qwen2-VL image processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmms_stream.errors import ConfigError
from lmms_stream.processors.media.patches import to_patches
from lmms_stream.versions.transformers import by_torchvision
from numpy.typing import NDArray
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from tests.versions import by_pillow

from ...strategies import examples

CLIP: dict[str, Any] = {
    "mean": [0.48145466, 0.4578275, 0.40821073],
    "std": [0.26862954, 0.26130258, 0.27577711],
}
HALF: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.5] * 3}
FAST_TOLERANCE = 1e-6  # the fast processors normalise by one product and one sum
CUT: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), np.uint8)


def slow(frames: NDArray[np.uint8], *, cut: dict[str, Any], values: dict[str, Any]) -> NDArray[np.float32]:
    """The patches of each frame, shown as often as a patch has frames; a patch of several has one of each."""
    processor = by_pillow("Qwen2VLImageProcessor")(
        do_resize=False, image_mean=values["mean"], image_std=values["std"], **cut
    )
    made = processor(list(frames), input_data_format="channels_last", return_tensors="np")["pixel_values"]
    size, group = cut["patch_size"] ** 2, cut["temporal_patch_size"]
    of_frames = made.reshape(len(frames), -1, 3, group, size)
    of_frames = np.concatenate([of_frames, *[of_frames[-1:]] * (-len(frames) % group)])
    grouped = of_frames.reshape(-1, group, *of_frames.shape[1:])
    patches = np.stack([grouped[:, at, :, :, at] for at in range(group)], axis=3)
    return np.asarray(patches.reshape(-1, 3 * group * size))


@examples(80)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 5),
    num_frames=st.integers(1, 5),
    patch_size=st.sampled_from([1, 4, 7, 8, 9, 14, 16, 17, 27]),
    merge_size=st.integers(1, 3),
    temporal_patch_size=st.integers(1, 3),
    values=st.sampled_from([CLIP, HALF]),
)
def test_patches_have_the_bits_of_transformers_slow_processor(
    rows: int, columns: int, num_frames: int, values: dict[str, Any], **cut: Any
) -> None:
    side = cut["patch_size"] * cut["merge_size"]
    frames = noise(num_frames, rows * side, columns * side)
    patches = to_patches(frames, **cut, **values)
    assert patches.dtype == np.float32
    assert np.array_equal(patches, slow(frames, cut=cut, values=values))


def test_all_levels_of_a_channel_have_the_bits_of_transformers() -> None:
    levels = np.arange(256, dtype=np.uint8).repeat(4).reshape(1, 32, 32)
    frames = np.stack([levels, levels[:, ::-1], levels[:, :, ::-1]], -1)
    cut: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    for values in (CLIP, HALF, {"mean": [0.1, 0.2, 0.3], "std": [0.3, 0.7, 1.0]}):
        assert np.array_equal(to_patches(frames, **cut, **values), slow(frames, cut=cut, values=values))


def test_patches_of_an_image_are_those_of_the_fast_processor_within_1e_6() -> None:
    image = noise(28 * 6, 28 * 9)
    expected = by_torchvision("Qwen2VLImageProcessor")(do_resize=False)(
        torch.from_numpy(image).permute(2, 0, 1), return_tensors="pt", input_data_format="channels_first"
    )
    assert expected["image_grid_thw"].tolist() == [[1, 12, 18]]
    ours = to_patches(image[None], **CUT, **CLIP)
    assert np.abs(ours - expected["pixel_values"].numpy()).max() <= FAST_TOLERANCE


@pytest.mark.parametrize("num_frames", [1, 2, 3, 8])
def test_patches_of_a_video_are_those_of_the_video_processors_within_1e_6(num_frames: int) -> None:
    frames = noise(num_frames, 32 * 7, 32 * 14)
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    options = {"do_resize": False, "do_sample_frames": False, "return_tensors": "pt"}
    expected = Qwen2VLVideoProcessor()(video, **options)["pixel_values_videos"].numpy()
    assert np.abs(to_patches(frames, **CUT, **CLIP) - expected).max() <= FAST_TOLERANCE
    expected = Qwen3VLVideoProcessor()(video, **options)["pixel_values_videos"].numpy()
    cut: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    assert np.abs(to_patches(frames, **cut, **HALF) - expected).max() <= FAST_TOLERANCE


def test_patches_of_several_images_are_written_into_one_array() -> None:
    images = [noise(1, 28, 56), noise(1, 84, 28)]
    together = np.zeros((8 + 12, 1176), np.float32)
    for image, rows in zip(images, (together[:8], together[8:]), strict=True):
        assert to_patches(image, **CUT, **CLIP, out=rows) is rows
    assert np.array_equal(together, np.concatenate([to_patches(image, **CUT, **CLIP) for image in images]))
    with pytest.raises(
        ConfigError, match=r"out is float32 \(20, 1176\), expected float32 \(8, 1176\), contiguous and writable"
    ):
        to_patches(images[0], **CUT, **CLIP, out=together)


def test_a_size_that_patches_do_not_divide_is_an_error() -> None:
    for shape in ((1, 28, 27), (1, 42, 28), (0, 28, 28)):
        with pytest.raises(
            ConfigError, match=r"pixels cannot be cut into patches: both sides must be multiples of .* = 28"
        ):
            to_patches(np.zeros((*shape, 3), np.uint8), **CUT, **CLIP)


def test_other_pixels_and_rows_that_cannot_be_written_are_named() -> None:
    image, rows = noise(1, 28, 56), np.zeros((8, 1176), np.float32)
    for frames in (image.astype(np.float32), image[0], image[..., :2]):
        with pytest.raises(
            ConfigError, match=rf"frames are {frames.dtype} .*, expected uint8 \[frames, height, width, 3"
        ):
            to_patches(frames, **CUT, **CLIP)  # type: ignore[arg-type]
    sealed = rows.copy()
    sealed.flags.writeable = False
    for out in (rows.astype(np.float64), rows.repeat(2, 0)[::2], sealed):
        with pytest.raises(ConfigError, match=rf"out is {out.dtype} \(8, 1176\), expected .* contiguous and writable"):
            to_patches(image, **CUT, **CLIP, out=out)  # type: ignore[arg-type]


def test_frames_in_any_layout_have_the_same_patches() -> None:
    frames = noise(3, 28, 56)
    frames.flags.writeable = False
    expected = to_patches(frames, **CUT, **CLIP)
    for view in (frames.repeat(2, 2)[:, :, ::2], np.asfortranarray(frames), frames[::-1].copy()[::-1]):
        assert np.array_equal(to_patches(view, **CUT, **CLIP), expected)
    assert to_patches(frames[:, :, :0], **CUT, **CLIP).shape == (0, 1176)
