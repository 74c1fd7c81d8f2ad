"""Their names -> ours, and what is said of names that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmms_stream.datasets import DatasetConfig
from lmms_stream.doors.lmms_engine.datasets.names import check, is_shards, processor_config_of
from lmms_stream.doors.lmms_engine.datasets.source_files import SourceEntry, list_files, sources_of
from lmms_stream.errors import ConfigError, DataError
from lmms_stream.processors import ProcessorConfig
from lmms_stream.processors.bagel_images import BagelSettings, VaeInput, VitInput

TEXT = {"processor_name": "x", "processor_type": "qwen2"}
PROCESSOR = {"processor_name": "somewhere", "processor_type": "qwen2_5_vl"}


def config(**given: Any) -> DatasetConfig:
    return DatasetConfig(**{"dataset_type": "vision", "dataset_path": "a.jsonl", "processor_config": PROCESSOR} | given)


def test_defaults_are_theirs_with_a_dataset_type_and_ours_without() -> None:
    names = ("packing", "packing_length", "packing_strategy", "overlong", "seed", "reshuffle", "shuffle")
    theirs, ours = config(), DatasetConfig(remote="shards")
    assert [getattr(theirs, name) for name in names] == [False, 32000, "first_fit", "drop", 42, False, True]
    assert [getattr(ours, name) for name in names] == [True, 4096, "best_fit", "error", 0, True, True]
    documents = config(dataset_type="fineweb_edu")
    assert (documents.overlong, documents.packing, documents.packing_length) == ("split", True, 32000)
    assert config(dataset_type="fineweb_edu", packing=False).packing is False
    assert config(filter_overlong=False, packing=True).overlong == "keep"
    assert config(filter_overlong=False).overlong == "error"  # each sample is a pack, however long
    assert config(data_seed=3).seed == 3


def test_sources_are_named_by_a_path_a_list_file_and_an_inline_list(tmp_path: Path) -> None:
    listed = tmp_path / "list.yaml"
    listed.write_text("datasets:\n- {path: a.jsonl, data_folder: media, data_type: jsonl}\n- {path: /b.parquet}\n")
    assert sources_of(config(dataset_format="jsonl")) == [SourceEntry("a.jsonl", None, "jsonl")]
    assert sources_of(config()) == [SourceEntry("a.jsonl", None, "")]
    assert sources_of(config(dataset_format="yaml", dataset_path=str(listed))) == [
        SourceEntry(str(tmp_path / "a.jsonl"), str(tmp_path / "media"), "jsonl"),
        SourceEntry("/b.parquet", None, ""),
    ]
    listed.write_text(
        "datasets:\n- {path: 'b.json#rows@[2:]', columns: {messages: chat}, limit: 9, media_root: media}\n"
        "- {path: 'hf:org/name', split: train}\n"
    )
    settings = {"columns": {"messages": "chat"}, "limit": 9, "media_root": str(tmp_path / "media")}
    assert sources_of(config(dataset_format="yaml", dataset_path=str(listed))) == [
        SourceEntry(f"{tmp_path}/b.json#rows@[2:]", None, "", settings),
        SourceEntry("hf:org/name", None, "", {"split": "train"}),
    ]
    inline = [{"path": "x", "data_folder": "m", "data_type": "hf_dataset"}, {"path": "y.csv"}]
    expected = [SourceEntry("x", "m", "hf_dataset"), SourceEntry("y.csv", None, "")]
    for format in ("yaml", None):
        assert sources_of(config(dataset_format=format, datasets=inline)) == expected


def test_shards_are_named_by_their_format_and_by_a_url(tmp_path: Path) -> None:
    assert sources_of(config(dataset_format="mds", dataset_path="x")) == [SourceEntry("x", None, "mds")]
    assert sources_of(config(dataset_path="s3://bucket/x")) == [SourceEntry("s3://bucket/x", None, "mds")]
    assert not is_shards(config(dataset_path="s3://bucket/x", dataset_format="jsonl"))
    assert not is_shards(config(dataset_path=str(tmp_path)))
    (tmp_path / "index.json").touch()
    assert is_shards(config(dataset_path=str(tmp_path)))


def test_types_and_processors_of_sound_are_ours_by_the_media_they_read() -> None:
    def made(processor_type: str, **given: Any) -> ProcessorConfig:
        said = {"processor_name": "x", "processor_type": processor_type, "extra_kwargs": {"audio_max_length": 20}}
        return processor_config_of(config(processor_config=said, **given))

    for name in ("vision_audio", "vision_audio_iterable"):
        assert made("qwen2_audio", dataset_type=name) == ProcessorConfig(type="audio", path="x", audio_max_length=20)
    for name in ("Qwen2_5OmniProcessor", "Qwen3OmniMoeProcessor"):
        for dataset_type in ("qwen_omni", "qwen_omni_iterable"):
            found = made(name, dataset_type=dataset_type, extra_kwargs={"use_audio_in_video": True})
            assert (found.type, found.path, found.use_audio_in_video, found.fps) == ("omni", "x", True, 1.0)


def test_the_dataset_to_evaluate_has_the_other_settings_of_the_config() -> None:
    assert config().evaluated is None
    found = config(eval_dataset_path="b.jsonl", packing=True).evaluated
    assert found is not None
    assert (found.dataset_path, found.packing) == ("b.jsonl", True)


@pytest.mark.parametrize("name", ["pure_text", "qwen2"])
def test_names_of_text_processors_choose_the_chat_processor(name: str) -> None:
    made = processor_config_of(config(processor_config={"processor_name": "n", "processor_type": name}))
    assert made == ProcessorConfig(type="chat", tokenizer="n")


def test_names_of_llava_choose_a_number_of_frames_for_each_video() -> None:
    said = {"processor_config": {**PROCESSOR, "processor_type": "llava_video"}, "dataset_type": "llava_video"}
    made = processor_config_of(config(**said))
    assert made == ProcessorConfig(type="vision", path="somewhere", frame_num=64, video_max_frames=768)
    assert processor_config_of(config(**said, frame_num=8, video_sampling_strategy="frame_num")).frame_num == 8
    for wrong in ({"fps": 2}, {"video_sampling_strategy": "fps"}):
        with pytest.raises(ConfigError, match="cannot be followed: LLaVA-OneVision reads as many frames of each video"):
            processor_config_of(config(**said, **wrong))


def test_llava_videos_slow_and_fast_frames_are_settings_of_the_processor() -> None:
    said: dict[str, Any] = {
        "processor_config": {**PROCESSOR, "processor_type": "llava_video"}, "dataset_type": "llava_video", "fps": 1,
        "video_sampling_strategy": "fps",
    }  # fmt: skip
    extra = {"frames_upbound": 16, "force_sample": True, "add_time_instruction": True, "faster_token_stride": 10}
    made = processor_config_of(config(**said, extra_kwargs=extra))
    assert made == ProcessorConfig(type="vision", path="somewhere", frame_num=16, slow_every=10, frame_times=True)
    for wrong, message in (
        ({"frames_upbound": 16}, "frames_upbound 16 without force_sample gives videos other numbers of frames"),
        (
            {"mm_spatial_pool_stride": 4},
            "mm_spatial_pool_stride 4 is not supported, only 2, LLaVA-OneVision",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            processor_config_of(config(**said, extra_kwargs=wrong))
    with pytest.raises(ConfigError, match="extra_kwargs of the dataset has no 'frames_upbound'"):
        processor_config_of(config(extra_kwargs=extra))


def test_names_of_vision_processors_choose_the_vision_processor_with_their_settings() -> None:
    said = {**PROCESSOR, "extra_kwargs": {"image_max_pixels": 1000}}
    made = processor_config_of(config(processor_config=said, fps=2))
    assert made == ProcessorConfig(
        type="vision", path="somewhere", image_max_pixels=1000, fps=2, video_max_frames=768, video_max_pixels=602112,
        video_min_pixels=3136,
    )  # fmt: skip
    counted = processor_config_of(config(video_sampling_strategy="frame_num"))
    assert (counted.fps, counted.frame_num) == (None, 64)
    qwen3 = processor_config_of(config(processor_config={**PROCESSOR, "processor_type": "qwen3_vl"}))
    assert (qwen3.video_max_pixels, qwen3.fps) == (None, 1)


def test_sequences_of_images_to_see_and_to_make_have_a_processor_of_their_own() -> None:
    extra = {"vae": {"max_side": 768}, "vit": {"dropout": 0.1}}
    said = {"processor_name": "n", "processor_type": "bagel", "extra_kwargs": extra}
    for dataset_type in ("bagel", "bagel_iterable"):
        made = processor_config_of(config(dataset_type=dataset_type, processor_config=said))
        settings = BagelSettings(vae=VaeInput(max_side=768), vit=VitInput(dropout=0.1))
        assert made == ProcessorConfig(type="bagel", tokenizer="n", bagel=settings)
    wrong = {**said, "extra_kwargs": {"vae": {"side": 9}}}
    with pytest.raises(ConfigError, match=r"extra_kwargs: unknown key 'vae\.side': did you mean 'vae\.m"):
        processor_config_of(config(dataset_type="bagel", processor_config=wrong))
    for given in ({"processor_config": said}, {"dataset_type": "bagel"}):
        with pytest.raises(ConfigError, match="do not go together: sequences of images to see and to make"):
            processor_config_of(config(**given))


def test_documents_are_read_by_the_processor_of_texts() -> None:
    said = {"processor_name": "n", "processor_type": "pure_text"}
    made = processor_config_of(config(dataset_type="fineweb_edu", processor_config=said))
    assert made == ProcessorConfig(type="text", tokenizer="n")


def test_an_unknown_key_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="DatasetConfig has no 'packing_lenght': did you mean 'packing_length'"):
        config(packing_lenght=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset_type": "visoin"}, "dataset_type has no 'visoin': did you mean 'vision'"),
        ({"dataset_format": "jsnol"}, "dataset_format has no 'jsnol': did you mean 'json"),
        ({"object_storage": "gcp"}, "object_storage has no 'gcp': did you mean 'gcs'"),
        ({"object_storage": "gcs"}, "needs bucket_name"),
        ({"bucket_name": "b"}, "bucket_name 'b' needs object_storage"),
        ({"video_backend": "decrod"}, "did you mean 'decord'"),
        ({"extra_kwargs": {"packing_kwarg": {}}}, "did you mean 'packing_kwargs'"),
        ({"extra_kwargs": {"use_audio_in_video": True}}, "processor_type 'qwen2_5_vl' is none: set it to false"),
        ({"max_length": 0}, "max_length must be at least 1 token"),
    ],
)
def test_values_that_cannot_be_kept_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"datasets": [{}], "dataset_format": "jsonl"}, "set dataset_format: yaml"),
        ({"dataset_path": None}, "dataset_path is missing"),
        ({"datasets": [{"paht": "x"}]}, "entry 0 of datasets is"),
        ({"datasets": [{"path": "x", "data_tpye": "json"}]}, "did you mean 'data_type'"),
        ({"datasets": [{"path": "x", "data_type": "parqet"}]}, "did you mean 'parquet'"),
    ],
)
def test_wrong_sources_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sources_of(config(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"processor_config": None}, "processor_config is missing"),
        ({"processor_config": {"processor_nme": "x"}}, "did you mean 'processor_name'"),
        ({"processor_config": {}}, "processor_name is missing"),
        ({"processor_config": {"processor_name": "x"}}, "processor_config.processor_type is missing"),
        ({"processor_config": {**PROCESSOR, "processor_type": "aero"}}, "'aero' is not supported"),
        ({"processor_config": {**PROCESSOR, "processor_type": "qwen2_vll"}}, "did you mean 'qwen2_vl'"),
        ({"processor_config": {**PROCESSOR, "extra_kwargs": {"image_pixels": 3}}}, "did you mean 'image_m"),
        (
            {
                "processor_config": {
                    "processor_name": "x",
                    "processor_type": "qwen2",
                    "extra_kwargs": {"image_max_pixels": 9},
                }
            },
            "is for images and videos",
        ),
        (
            {
                "processor_config": {
                    **PROCESSOR,
                    "processor_type": "qwen3_vl",
                    "extra_kwargs": {"use_audio_in_video": True},
                }
            },
            "extra_kwargs has no 'use_audio_in_video'",
        ),
        (
            {"processor_config": {**PROCESSOR, "processor_type": "qwen3_vl"}, "video_min_pixels": 3},
            "set it in processor_config.extra_kwargs",
        ),
    ],
)
def test_wrong_processors_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processor_config_of(config(**given))


def test_weights_and_wrong_settings_of_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="entry 0 of datasets has a weight, but sources are read one after"):
        sources_of(config(dataset_format="yaml", datasets=[{"path": "x", "weight": 1}]))
    with pytest.raises(DataError, match="entry 0 of datasets: limit is 'x': expected a number of rows"):
        sources_of(config(dataset_format="yaml", datasets=[{"path": "x", "limit": "x"}]))
    for key in "map", "filter":
        source = SourceEntry("x", None, "", {key: "module:function"})
        with pytest.raises(ConfigError, match=f"x: {key} applies only to conversions, but these sources are read"):
            list_files([source], num_lanes=1, scratch=tmp_path, keeps_refused=False)
        (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
        (tmp_path / "list.yaml").write_text(f"datasets:\n- {{path: a.jsonl, {key}: 'module:function'}}\n")
        within = SourceEntry(str(tmp_path / "list.yaml"), None, "", {})
        with pytest.raises(ConfigError, match=rf"a\.jsonl: {key} applies only to conversions"):
            list_files([within], num_lanes=1, scratch=tmp_path, keeps_refused=False)


def test_a_list_that_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("datasets: 3")
    with pytest.raises(DataError, match="expected a list `datasets`"):
        sources_of(config(dataset_path=str(tmp_path / "list.yaml")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs remote, the folder or URL of its shards, or dataset_type"),
        ({"dataset_path": "x"}, "dataset_path is for a dataset with a dataset_type"),
        ({"dataset_type": "vision", "remote": "x"}, "rows of dataset_path: leave remote or dataset_type out"),
        ({"remote": "x", "seed": 1, "data_seed": 2}, "set the same value: leave one of them out"),
    ],
)
def test_a_config_is_either_of_shards_or_of_sources(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetConfig(**given)


def test_a_config_of_sources_is_opened_by_the_classes_of_datasets_alone() -> None:
    with pytest.raises(ConfigError, match=r"give the config to .*MultiModalDataset"):
        config().open()
