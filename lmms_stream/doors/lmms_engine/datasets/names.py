"""Their names of types, formats and processors -> ours. A config -> [names] -> its sources and its processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ....config import build_config
from ....converters.sources.lists import YAML_KEYS, list_entries
from ....converters.sources.specs import SETTING_KEYS, settings_of
from ....errors import ConfigError
from ....mds.dataset_config import DatasetConfig, check_names
from ....processors import MEDIA_TYPES, ProcessorConfig
from ....processors.bagel_images import BagelSettings
from ....processors.base import Processor

SHARDS = "mds"  # the format of datasets that are shards
LIST = "yaml"
SOURCE_FORMATS = ("json", "jsonl", "csv", "tsv", "arrow", "parquet", "hf_dataset", "webdataset", "lines")
FORMATS = (*SOURCE_FORMATS, LIST, SHARDS)
BACKENDS = ("qwen_vl_utils", "decord", "qwen_omni_utils", "lmms_video_utils")
STORES = {"none": "", "azure": "azure", "gcs": "gs", "s3": "s3"}  # object_storage -> the scheme of a bucket's URL
PROCESSOR_KEYS = ("processor_name", "processor_type", "extra_kwargs")
EXTRA_KEYS = ("packing_kwargs", "use_audio_in_video", "collator_type")
LLAVA_VIDEO_KEYS = {  # of extra_kwargs, for dataset_type llava_video -> the only value that is followed, if any
    "data_folder": None, "frames_upbound": None, "force_sample": None, "add_time_instruction": None,
    "faster_token_stride": None, "mm_spatial_pool_stride": 2, "mm_spatial_pool_mode": "bilinear",
}  # fmt: skip
BAGEL = "bagel"
MEDIA_KEYS = ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "audio_max_length")
OMNI_KEYS = (*MEDIA_KEYS, "use_audio_in_video")
IMAGE_KEYS = ("image_size", "flip", "augment_seed")
VIDEO_DEFAULTS: Mapping[str, Any] = {
    "video_max_pixels": 602112, "video_min_pixels": 3136, "video_max_frames": 768, "frame_num": 64, "fps": 1.0,
}  # theirs; pixels are of a frame # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """path: a file, folder, glob or URL; a hub id or saved folder with data_type "hf_dataset". data_folder: where paths
    of media start (None: where the source lies). data_type: one of SOURCE_FORMATS, "mds", or "" to tell it by content.
    settings: what else the entry of a list says, by SETTING_KEYS.
    """

    path: str
    data_folder: str | None
    data_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> dict[str, Any]:
        """As an entry of a list."""
        said = {"path": self.path, "data_folder": self.data_folder, "data_type": self.data_type or None}
        return {**said, **self.settings}


@dataclass(frozen=True, slots=True)
class DatasetType:
    """What rows a dataset_type has: the kind of a row and what its samples are of. is_iterable: read as it streams.

    made_by: the class of a type that a user has registered.
    """

    kind: Literal["messages", "text", "image"]
    is_iterable: bool
    says: str
    made_by: type | None = None

    @property
    def row_kind(self) -> str | None:
        """The kind of rows that is insisted on; None where it is found."""
        return None if self.kind == "messages" else self.kind


TYPES: Mapping[str, DatasetType] = {
    "vision": DatasetType("messages", False, "chats with images and videos, and of text alone"),
    "qwen3_vl": DatasetType("messages", False, "the same, with Qwen3-VL's processor"),
    "qwen3_5": DatasetType("messages", False, "the same, with Qwen3.5's processor"),
    "llava_video": DatasetType("messages", False, "the same, with LLaVA-OneVision's processor"),
    "vision_audio": DatasetType(
        "messages", False, "chats with sounds, and images and videos where the processor reads them"
    ),
    "qwen_omni": DatasetType("messages", False, "the same, with a Qwen-Omni processor"),
    "vision_iterable": DatasetType("messages", True, "as vision, streamed"),
    "qwen3_vl_iterable": DatasetType("messages", True, "as qwen3_vl, streamed"),
    "qwen3_5_iterable": DatasetType("messages", True, "as qwen3_5, streamed"),
    "llava_video_iterable": DatasetType("messages", True, "as llava_video, streamed"),
    "vision_audio_iterable": DatasetType("messages", True, "as vision_audio, streamed"),
    "qwen_omni_iterable": DatasetType("messages", True, "as qwen_omni, streamed"),
    "fineweb_edu": DatasetType(
        "text", True, "documents: column `text` alone, each followed by the end-of-text token, cut and packed; streamed"
    ),
    "fineweb_edu_iterable": DatasetType("text", True, "the same"),
    "sit": DatasetType("image", False, "images and numbers of classes, columns image and label: flow matching"),
    "sit_iterable": DatasetType("image", True, "as sit, streamed"),
    "rae": DatasetType("image", False, "images, column image: reconstruction"),
    "rae_iterable": DatasetType("image", True, "as rae, streamed"),
    "bagel": DatasetType("messages", False, "chats with images to see, and the assistant's, which are to be made"),
    "bagel_iterable": DatasetType("messages", True, "as bagel, streamed"),
}


@dataclass(frozen=True, slots=True)
class ProcessorType:
    """kind: of ours. processor_classes: of the folder's processor, where only these will do. crop: of images."""

    kind: Literal["chat", "vision", "audio", "omni", "image", "bagel"]
    processor_class: str = ""
    crop: Literal["center", "random"] | None = None


OF_ALL_FRAMES = ("qwen3_vl", "qwen3_5", "nit")  # whose limits on pixels are of all frames of a video together
LLAVA_ONEVISION = "LlavaOnevisionProcessor"
PROCESSORS: Mapping[str, ProcessorType] = {
    "pure_text": ProcessorType("chat"),
    "qwen2": ProcessorType("chat"),
    "qwen3": ProcessorType("chat"),
    "qwen2_vl": ProcessorType("vision", "Qwen2VLProcessor"),
    "qwen2_5_vl": ProcessorType("vision", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ProcessorType("vision", "Qwen3VLProcessor"),
    "qwen3_5": ProcessorType("vision", "Qwen3VLProcessor"),
    "nit": ProcessorType("vision"),
    "llava": ProcessorType("vision", LLAVA_ONEVISION),
    "llava_video": ProcessorType("vision", LLAVA_ONEVISION),
    "qwen2_audio": ProcessorType("audio", "Qwen2AudioProcessor"),
    "Qwen2_5OmniProcessor": ProcessorType("omni", "Qwen2_5OmniProcessor"),
    "Qwen3OmniMoeProcessor": ProcessorType("omni", "Qwen3OmniMoeProcessor"),
    "sit": ProcessorType("image", crop="center"),
    "rae_siglip": ProcessorType("image", crop="random"),
    "bagel": ProcessorType("bagel"),
}
OWN_TYPES: dict[str, DatasetType] = {}  # that users have registered
# processor_type that a user has registered -> what makes a processor of a processor_config
OWN_PROCESSORS: dict[str, Callable[[Mapping[str, Any]], Processor]] = {}
LATER_TYPES = ("aero_realtime_iterable", "llava_ov2_iterable")
LATER_PROCESSORS = ("llava_onevision2", "nanovlm", "aero", "aero_realtime", "wanvideo")


def dataset_type_of(config: DatasetConfig) -> DatasetType:
    """ConfigError for a type that is unknown."""
    found: DatasetType = _named({**TYPES, **OWN_TYPES}, LATER_TYPES, config.dataset_type, "dataset_type")
    return found


def check(config: DatasetConfig) -> None:
    """ConfigError for values that are none, or that cannot be kept."""
    dataset_type_of(config)
    if config.dataset_format is not None and config.dataset_format not in FORMATS:
        check_names([config.dataset_format], FORMATS, "dataset_format")
    if config.object_storage is not None:
        check_names([config.object_storage], [*STORES], "object_storage")
    if (config.object_storage or "none") != "none" and not config.bucket_name:
        raise ConfigError(f"object_storage {config.object_storage!r} needs bucket_name: name the bucket of the shards")
    if config.bucket_name and (config.object_storage or "none") == "none":
        raise ConfigError(
            f"bucket_name {config.bucket_name!r} needs object_storage ({', '.join(list(STORES)[1:])}): name it"
        )
    if config.video_backend is not None:
        check_names([config.video_backend], BACKENDS, "video_backend")
    _check_extra(config)
    processor_type = (config.processor_config or {}).get("processor_type")
    of_type = PROCESSORS.get(str(processor_type))
    if (config.extra_kwargs or {}).get("use_audio_in_video") and of_type is not None and of_type.kind != "omni":
        raise ConfigError(
            f"extra_kwargs.use_audio_in_video needs a processor of videos and sounds, and processor_type "
            f"{processor_type!r} is none: set it to false, and videos are read without their sound"
        )
    for name in ("max_length", "packing_length"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1 token, got {value}")


def _check_extra(config: DatasetConfig) -> None:
    """ConfigError for keys of extra_kwargs that the type does not have, and values that are not followed."""
    extra = config.extra_kwargs or {}
    is_llava = str(config.dataset_type).removesuffix("_iterable") == "llava_video"
    check_names(extra, [*EXTRA_KEYS, *(LLAVA_VIDEO_KEYS if is_llava else ())], "extra_kwargs of the dataset")
    for name, only in LLAVA_VIDEO_KEYS.items():
        if only is not None and extra.get(name) not in (None, only):
            raise ConfigError(
                f"extra_kwargs.{name} {extra[name]!r} cannot be followed, only {only!r}, by which LLaVA-OneVision "
                "pools its frames: leave it out"
            )
    if extra.get("frames_upbound") and not extra.get("force_sample"):
        raise ConfigError(
            f"extra_kwargs.frames_upbound {extra['frames_upbound']} without force_sample gives videos other numbers of "
            "frames, and LLaVA-OneVision's model takes as many of each: set force_sample to true"
        )


def is_shards(config: DatasetConfig) -> bool:
    """Whether the config names shards that are there: by its format, or without one by what lies at dataset_path."""
    if config.dataset_format is not None:
        return config.dataset_format == SHARDS
    path = str(config.dataset_path or "")
    return "://" in path or (Path(path) / "index.json").is_file()


def sources_of(config: DatasetConfig) -> list[SourceEntry]:
    """What is read, one source after another; ConfigError where the config names none, DataError for a wrong list."""
    check(config)
    format = SHARDS if is_shards(config) else config.dataset_format
    if config.datasets is not None:
        if format not in (LIST, None) and not all(_has_type(each) for each in config.datasets):
            raise ConfigError(
                f"datasets is a list of sources, and dataset_format is {format!r}: set dataset_format: yaml, name "
                "the data_type of each, or leave datasets out"
            )
        return [_entry(number, each) for number, each in enumerate(config.datasets)]
    if not config.dataset_path:
        raise ConfigError("dataset_path is missing: name a file, a folder, a URL or a hub id, or give datasets, a list")
    path = str(config.dataset_path)
    if format == LIST or (format is None and path.endswith((".yaml", ".yml"))):
        entries = list_entries(Path(path))
        return [_source(each, f"entry {number} of {path}") for number, each in enumerate(entries, start=1)]
    if format == "json" and path.endswith(".jsonl"):
        format = "jsonl"
    return [SourceEntry(path, (config.extra_kwargs or {}).get("data_folder"), format or "")]


def _has_type(entry: Any) -> bool:
    return isinstance(entry, Mapping) and bool(entry.get("data_type"))


def _source(entry: Mapping[str, Any], where: str) -> SourceEntry:
    if entry.get("weight") is not None:
        raise ConfigError(
            f"{where} has a weight, and sources are read one after another: leave it out, or convert the list with "
            "lmms-stream convert, which writes a dataset for each entry and their weights for a run"
        )
    settings = {key: entry[key] for key in SETTING_KEYS if entry.get(key) is not None}
    return SourceEntry(entry["path"], entry.get("data_folder") or None, entry.get("data_type") or "", settings)


def _entry(number: int, entry: Mapping[str, Any]) -> SourceEntry:
    where = f"entry {number} of datasets"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise ConfigError(f"{where} is {entry!r}: write {{path: …, data_folder: …, data_type: …}}")
    check_names(entry, YAML_KEYS, where)
    settings_of(entry, where=where)
    data_type = entry.get("data_type") or ""
    if data_type:
        check_names([data_type], SOURCE_FORMATS, f"data_type of {where}")
    return _source(entry, where)


def processor_config_of(config: DatasetConfig) -> ProcessorConfig:
    """Which of our processors a config means, and how it is set."""
    check(config)
    said = config.processor_config
    if said is None:
        if config.processor == ProcessorConfig():
            raise ConfigError("processor_config is missing: give processor_name and processor_type")
        return config.processor
    check_names(said, PROCESSOR_KEYS, "processor_config")
    name = said.get("processor_name")
    if dataset_type_of(config).kind == "image":
        return _image_config(said)
    if not name:
        raise ConfigError(
            "processor_config.processor_name is missing: name the folder or hub id of a processor, or give the dataset "
            "to a trainer, which takes the model's"
        )
    kind = _named(PROCESSORS, LATER_PROCESSORS, said.get("processor_type"), "processor_config.processor_type").kind
    extra = said.get("extra_kwargs") or {}
    is_bagel = str(config.dataset_type).removesuffix("_iterable") == BAGEL
    if is_bagel != (kind == BAGEL):
        raise ConfigError(
            f"dataset_type {config.dataset_type!r} and processor_type {said['processor_type']!r} do not go together: "
            "sequences of images to see and to make are of dataset_type bagel and processor_type bagel"
        )
    if kind == BAGEL:
        bagel = build_config(BagelSettings, extra, source="processor_config.extra_kwargs")
        return ProcessorConfig(type="bagel", tokenizer=str(name), bagel=bagel)
    check_names(extra, OMNI_KEYS if kind == "omni" else MEDIA_KEYS, "processor_config.extra_kwargs")
    if dataset_type_of(config).kind == "text":
        return ProcessorConfig(type="text", tokenizer=str(name))
    if kind == "chat":
        if extra:
            raise ConfigError(
                f"processor_config.extra_kwargs {', '.join(extra)} is for images and videos, and processor_type "
                f"{said['processor_type']!r} reads text: leave it out"
            )
        return ProcessorConfig(type="chat", tokenizer=str(name))
    settings: dict[str, Any] = {} if kind == "audio" else _video_settings(config, said["processor_type"])
    settings |= extra
    if (config.extra_kwargs or {}).get("use_audio_in_video"):
        settings["use_audio_in_video"] = True
    return ProcessorConfig(type=kind, path=str(name), **settings)


def _image_config(said: Mapping[str, Any]) -> ProcessorConfig:
    """Images need no folder, so processor_name counts nothing."""
    found = _named(PROCESSORS, LATER_PROCESSORS, said.get("processor_type"), "processor_config.processor_type")
    if found.kind != "image":
        images = [name for name, each in PROCESSORS.items() if each.kind == "image"]
        raise ConfigError(
            f"processor_type {said['processor_type']!r} reads no images that are to be made: give {' or '.join(images)}"
        )
    extra = said.get("extra_kwargs") or {}
    check_names(extra, IMAGE_KEYS, "processor_config.extra_kwargs")
    return build_config(
        ProcessorConfig, {"type": "image", "crop": found.crop, **extra}, source="processor_config.extra_kwargs"
    )


def lacks_processor(config: DatasetConfig) -> bool:
    """Return whether a config names the type of its processor alone, whose folder is then the model's."""
    said = config.processor_config or {}
    type_of = PROCESSORS.get(str(said.get("processor_type")))
    return type_of is not None and type_of.kind != "image" and not said.get("processor_name")


def with_processor(config: DatasetConfig, name: str) -> DatasetConfig:
    """Return a config that lacks its processor with the one in a model's folder, or of its hub id."""
    return replace(config, processor_config={**(config.processor_config or {}), "processor_name": name})


def reads_videos(config: DatasetConfig) -> bool:
    """Return whether the processor of a config may read videos."""
    processor_type = str((config.processor_config or {}).get("processor_type"))
    if processor_type in OWN_PROCESSORS:
        return True
    if lacks_processor(config):
        return PROCESSORS[processor_type].kind != "chat"
    return processor_config_of(config).kind not in ("chat", "text", "tokens")


def processor_of(config: DatasetConfig) -> Processor:
    """The processor of a config; ConfigError for a folder of another family than its processor_type."""
    said = config.processor_config or {}
    if (own := OWN_PROCESSORS.get(str(said.get("processor_type")))) is not None:
        return own(said)
    made = processor_config_of(config)
    if made.kind in MEDIA_TYPES and config.processor_config is not None:
        _check_family(str(made.path), str(config.processor_config["processor_type"]))
    return made.build()


def _check_family(path: str, processor_type: str) -> None:
    from ....processors.families.files import read_files

    found, wanted = read_files(path).processor_class, PROCESSORS[processor_type].processor_class
    if found and wanted and found != wanted:
        raise ConfigError(
            f"processor_type {processor_type!r} is of a {wanted}, and {path} holds a {found}: change one of them"
        )


def _video_settings(config: DatasetConfig, processor_type: str) -> dict[str, Any]:
    """Settings of media. Qwen3-VL's processor has limits on the pixels of all frames, others on those of a frame."""
    if PROCESSORS[processor_type].processor_class == LLAVA_ONEVISION:
        return _settings_of_llava(config)
    strategy = config.video_sampling_strategy or "fps"
    names = ["video_max_frames", "fps" if strategy == "fps" else "frame_num"]
    if processor_type not in OF_ALL_FRAMES:
        names += ["video_max_pixels", "video_min_pixels"]
    elif config.video_min_pixels:
        raise ConfigError(
            "video_min_pixels is of a frame, and Qwen3-VL's processor counts the pixels of all frames of a video: set "
            "it in processor_config.extra_kwargs, for all frames"
        )
    given = {name: getattr(config, name) for name in names}
    settings = {name: VIDEO_DEFAULTS[name] if value is None else value for name, value in given.items()}
    if processor_type in OF_ALL_FRAMES and config.video_max_pixels:
        settings["frame_max_pixels"] = config.video_max_pixels
    return settings


def _settings_of_llava(config: DatasetConfig) -> dict[str, Any]:
    """A number of frames: it is the same for each video, whatever its length, and a frame has one size."""
    extra = config.extra_kwargs or {}
    settings: dict[str, Any] = {
        ours: extra[theirs]
        for ours, theirs in (("slow_every", "faster_token_stride"), ("frame_times", "add_time_instruction"))
        if extra.get(theirs)
    }
    if extra.get("force_sample") and extra.get("frames_upbound"):
        return {"frame_num": extra["frames_upbound"], **settings}
    if config.video_sampling_strategy == "fps" or config.fps is not None:
        raise ConfigError(
            f"fps {config.fps} and video_sampling_strategy {config.video_sampling_strategy!r} cannot be followed: "
            "LLaVA-OneVision reads as many frames of each video, whatever its length: set frame_num, and the strategy "
            "to frame_num"
        )
    pixels = {"video_max_pixels": config.video_max_pixels, "video_min_pixels": config.video_min_pixels}
    limits = {name: value for name, value in pixels.items() if value is not None}  # which the processor refuses by name
    frames = {"video_max_frames": config.video_max_frames, "frame_num": config.frame_num}
    chosen = {name: VIDEO_DEFAULTS[name] if value is None else value for name, value in frames.items()}
    return limits | chosen | settings


def _named(table: Mapping[str, Any], later: tuple[str, ...], name: Any, what: str) -> Any:
    if name in table:
        return table[name]
    if name is None:
        raise ConfigError(f"{what} is missing: give one of {', '.join(table)}")
    if name in later:
        raise ConfigError(
            f"{what} {name!r} is not there yet, as its model is a class of LMMS Engine's alone: train it there, or "
            f"take one of {', '.join(table)}"
        )
    check_names([name], [*table], what)
    raise AssertionError(name)
