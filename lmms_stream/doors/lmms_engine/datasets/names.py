"""LMMS Engine's DatasetConfig, and its names of types, formats and processors. config -> sources, processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ....checks import check_fields, of_type
from ....config import OldKey, build_config
from ....errors import ConfigError
from ....mds import dataset_config as shards
from ....mds.dataset_config import check_names
from ....plan.packing import Overlong
from ....processors import MEDIA_TYPES, ProcessorConfig
from ....processors.bagel_images import BagelSettings
from ....processors.base import Processor

SHARDS = "mds"  # format of existing shards
LIST = "yaml"
SOURCE_FORMATS = ("json", "jsonl", "csv", "tsv", "arrow", "parquet", "hf_dataset", "webdataset", "lines")
FORMATS = (*SOURCE_FORMATS, LIST, SHARDS)
BACKENDS = ("qwen_vl_utils", "decord", "qwen_omni_utils", "lmms_video_utils")
STORES = {"none": "", "azure": "azure", "gcs": "gs", "s3": "s3"}  # object_storage -> URL scheme of a bucket
PROCESSOR_KEYS = ("processor_name", "processor_type", "extra_kwargs")
EXTRA_KEYS = ("packing_kwargs", "use_audio_in_video", "collator_type")
LLAVA_VIDEO_KEYS = {  # keys of extra_kwargs for dataset_type llava_video -> the only supported value, if any
    "data_folder": None, "frames_upbound": None, "force_sample": None, "add_time_instruction": None,
    "faster_token_stride": None, "mm_spatial_pool_stride": 2, "mm_spatial_pool_mode": "bilinear",
}  # fmt: skip
BAGEL = "bagel"
MEDIA_KEYS = ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "audio_max_length")
OMNI_KEYS = (*MEDIA_KEYS, "use_audio_in_video")
TRUST = "trust_remote_code"
IMAGE_KEYS = ("image_size", "flip", "augment_seed")
VIDEO_DEFAULTS: Mapping[str, Any] = {
    "video_max_pixels": 602112, "video_min_pixels": 3136, "video_max_frames": 768, "frame_num": 64, "fps": 1.0,
}  # theirs; pixels are of a frame # fmt: skip


# Fields of LMMS Engine's DatasetConfig, for a dataset with a dataset_type.

ENGINE_PACKING_LENGTH = 32000  # LMMS Engine's default
ENGINE_SEED = 42
CUT_TYPES = ("fineweb_edu", "fineweb_edu_iterable")  # documents are cut and packed; no token is left out
_OF_SHARDS_TOO = ("packing", "filter_overlong", "data_seed")  # also for shards without a dataset_type


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDatasetConfig(shards.DatasetConfig):
    """LMMS Engine's DatasetConfig: sources, reading of their samples, and the location of their shards.

    docs/datasets.md has each field. A default of None depends on dataset_type. Construction sets, without (with)
    dataset_type: packing True (False), packing_length 4096 (32000), packing_strategy "best_fit" ("first_fit"), overlong
    "error" ("drop"), seed 0 (42), reshuffle True (False).

    dataset_type: kind of dataset; the next fields apply only with it. dataset_format: format of dataset_path, or "yaml"
    for a list of sources in this file or in `datasets`; "mds", or None, for existing shards. processor_config:
    processor_name, processor_type, extra_kwargs. packing: whether samples share packs; default True for documents
    (fineweb_edu). filter_overlong: leave out and count samples longer than a pack (True), or keep each as a separate
    pack (False). max_length: leave out and count longer samples, unless filter_overlong is False. cache_dir: location
    of the sources' shards. object_storage, bucket_name: location of shards that already exist; in a launch file the
    location of media. reshuffle: repack in each epoch. on_error: end the run at an invalid row ("fail"), or leave out
    and count invalid rows ("skip").
    """

    dataset_type: str | None = None
    dataset_format: str | None = None
    dataset_path: str | None = None
    datasets: list[dict[str, Any]] | None = field(default=None, hash=False)
    processor_config: dict[str, Any] | None = field(default=None, hash=False)
    packing: bool | None = None
    filter_overlong: bool | None = None
    filter_overlong_workers: int | None = None
    max_length: int | None = None
    data_seed: int | None = None
    eval_dataset_path: str | None = None
    object_storage: str | None = None
    bucket_name: str | None = None
    video_sampling_strategy: Literal["fps", "frame_num"] | None = None
    video_max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_max_frames: int | None = None
    frame_num: int | None = None
    fps: float | None = None
    video_backend: str | None = None
    extra_kwargs: dict[str, Any] | None = field(default=None, hash=False)
    cache_dir: str | None = None
    on_error: Literal["fail", "skip"] = "fail"
    packing_length: int = None  # type: ignore[assignment]
    packing_strategy: str = None  # type: ignore[assignment]
    overlong: Overlong = None  # type: ignore[assignment]
    seed: int = None  # type: ignore[assignment]
    reshuffle: bool = None  # type: ignore[assignment]
    OLD_KEYS: ClassVar[Mapping[str, OldKey]] = {}
    HAS_MEDIA_IN_BUCKET: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, paths=("remote", "local", "cache_dir", "dataset_path", "eval_dataset_path"))
        object.__setattr__(self, "processor_config", with_media_keys(self.processor_config))
        self._check_given()
        if self.seed is not None and self.data_seed is not None and self.seed != self.data_seed:
            raise ConfigError(
                f"seed {self.seed} and data_seed {self.data_seed} set the same value: leave one of them out"
            )
        for name, value in _defaults(self).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.dataset_type is None and not self.packing:
            object.__setattr__(self, "max_samples_per_pack", 1)

    def _check_given(self) -> None:
        """Raise ConfigError for fields of a dataset_type without a dataset_type, and the other way round."""
        if self.dataset_type is not None:
            if self.remote:
                raise ConfigError(
                    f"remote {self.remote!r} is for shards, and dataset_type {self.dataset_type!r} for rows of "
                    "dataset_path: leave remote or dataset_type out"
                )
            return
        of_shards = {*shards.DatasetConfig.__dataclass_fields__, *_OF_SHARDS_TOO}
        for each in fields(self):
            if each.name not in of_shards and getattr(self, each.name) != each.default:
                raise ConfigError(
                    f"{each.name} is for a dataset with a dataset_type: add dataset_type, or leave {each.name} out"
                )
        if not self.remote:
            raise ConfigError("a dataset needs remote, the folder or URL of its shards, or dataset_type: set one")

    @property
    def source_type(self) -> str | None:
        return self.dataset_type

    @property
    def longest(self) -> int | None:
        """Maximum tokens of a sample; None without a limit."""
        return None if self.filter_overlong is False else self.max_length

    @property
    def evaluated(self) -> EngineDatasetConfig | None:
        """The config of eval_dataset_path, with all other settings; None without eval_dataset_path."""
        if self.eval_dataset_path is None:
            return None
        return replace(self, dataset_path=self.eval_dataset_path, datasets=None, eval_dataset_path=None)


DatasetConfig = EngineDatasetConfig  # LMMS Engine's name


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedDatasetConfig(EngineDatasetConfig):
    """The dataset_config of a launch file: the bucket has the media of rows, like in LMMS Engine."""

    HAS_MEDIA_IN_BUCKET: ClassVar[bool] = True


def with_media_keys(said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a processor_config with the keys of media in extra_kwargs; LMMS Engine's examples have some outside."""
    media = {name: value for name, value in (said or {}).items() if name in OMNI_KEYS and value is not None}
    if said is None or not media:
        return None if said is None else dict(said)
    extra = said.get("extra_kwargs") or {}
    if twice := [name for name in media if extra.get(name, media[name]) != media[name]]:
        raise ConfigError(
            f"processor_config has {twice[0]} {media[twice[0]]!r} and, in extra_kwargs, {extra[twice[0]]!r}: leave one "
            "of them out"
        )
    return {name: said[name] for name in said if name not in OMNI_KEYS} | {"extra_kwargs": {**extra, **media}}


def _defaults(config: EngineDatasetConfig) -> dict[str, Any]:
    """Return the defaults that depend on dataset_type."""
    of_engine = config.dataset_type is not None
    are_cut = config.dataset_type in CUT_TYPES
    packing = not of_engine or are_cut if config.packing is None else config.packing
    kept = "keep" if packing else "error"  # without packing, no sample is longer than its pack
    overlong = {True: "drop", False: kept, None: "drop" if of_engine else "error"}[config.filter_overlong]
    return {
        "packing": packing,
        "packing_length": ENGINE_PACKING_LENGTH if of_engine else 4096,
        "packing_strategy": "first_fit" if of_engine else "best_fit",
        "overlong": "split" if are_cut else overlong,
        "seed": config.data_seed if config.data_seed is not None else (ENGINE_SEED if of_engine else 0),
        "reshuffle": not of_engine,
    }


@dataclass(frozen=True, slots=True)
class DatasetType:
    """Rows of a dataset_type: kind of row and content of samples. is_iterable: streamed.

    made_by: class of a type registered by a user.
    """

    kind: Literal["messages", "text", "image"]
    is_iterable: bool
    says: str
    made_by: type | None = None

    @property
    def row_kind(self) -> str | None:
        """Required kind of rows; None to detect it."""
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
    """Our processor for a processor_type. kind: our type. processor_class: required class of the folder's processor; ""
    for any. crop: crop of images.
    """

    kind: Literal["chat", "vision", "audio", "omni", "image", "bagel"]
    processor_class: str = ""
    crop: Literal["center", "random"] | None = None


OF_ALL_FRAMES = ("qwen3_vl", "qwen3_5", "nit")  # types with pixel limits for all frames of a video together
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
OWN_TYPES: dict[str, DatasetType] = {}  # types registered by users
# processor_type registered by a user -> function from a processor_config to a processor
OWN_PROCESSORS: dict[str, Callable[[Mapping[str, Any]], Processor]] = {}
LATER_TYPES = ("aero_realtime_iterable", "llava_ov2_iterable")
LATER_PROCESSORS = ("llava_onevision2", "nanovlm", "aero", "aero_realtime", "wanvideo")


def dataset_type_of(config: EngineDatasetConfig) -> DatasetType:
    """Return the DatasetType of a config; ConfigError for an unknown type."""
    found: DatasetType = _named({**TYPES, **OWN_TYPES}, LATER_TYPES, config.dataset_type, "dataset_type")
    return found


def check(config: EngineDatasetConfig) -> None:
    """Raise ConfigError for invalid or unsupported values."""
    dataset_type_of(config)
    if config.dataset_format is not None and config.dataset_format not in FORMATS:
        check_names([config.dataset_format], FORMATS, "dataset_format")
    if config.object_storage is not None:
        check_names([config.object_storage], [*STORES], "object_storage")
    if (config.object_storage or "none") != "none" and not config.bucket_name:
        raise ConfigError(f"object_storage {config.object_storage!r} needs bucket_name: name the bucket")
    if config.bucket_name and (config.object_storage or "none") == "none":
        raise ConfigError(
            f"bucket_name {config.bucket_name!r} needs object_storage ({', '.join(list(STORES)[1:])}): name it"
        )
    if config.video_backend is not None:
        check_names([config.video_backend], BACKENDS, "video_backend")
    _check_extra(config)
    processor_type = (config.processor_config or {}).get("processor_type")
    if processor_type is not None and processor_type not in OWN_PROCESSORS:
        _named(PROCESSORS, LATER_PROCESSORS, processor_type, "processor_config.processor_type")
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


def _check_extra(config: EngineDatasetConfig) -> None:
    """Raise ConfigError for unknown keys of extra_kwargs, and for unsupported values."""
    extra = config.extra_kwargs or {}
    is_llava = str(config.dataset_type).removesuffix("_iterable") == "llava_video"
    check_names(extra, [*EXTRA_KEYS, *(LLAVA_VIDEO_KEYS if is_llava else ())], "extra_kwargs of the dataset")
    for name, only in LLAVA_VIDEO_KEYS.items():
        if only is not None and extra.get(name) not in (None, only):
            raise ConfigError(
                f"extra_kwargs.{name} {extra[name]!r} is not supported, only {only!r}, LLaVA-OneVision's way to pool "
                "frames: leave it out"
            )
    if extra.get("frames_upbound") and not extra.get("force_sample"):
        raise ConfigError(
            f"extra_kwargs.frames_upbound {extra['frames_upbound']} without force_sample gives videos other numbers of "
            "frames, and LLaVA-OneVision's model takes as many of each: set force_sample to true"
        )


def is_shards(config: EngineDatasetConfig) -> bool:
    """Whether the config names existing shards: by format, or if unset, by a URL or an index.json in dataset_path."""
    if config.dataset_format is not None:
        return config.dataset_format == SHARDS
    path = str(config.dataset_path or "")
    return "://" in path or (Path(path) / "index.json").is_file()


def processor_config_of(config: EngineDatasetConfig) -> ProcessorConfig:
    """Return our ProcessorConfig for a config."""
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
    extra = dict(said.get("extra_kwargs") or {})
    trust: dict[str, Any] = {TRUST: bool(of_type(f"extra_kwargs.{TRUST}", extra.pop(TRUST, None), "bool", None))}
    is_bagel = str(config.dataset_type).removesuffix("_iterable") == BAGEL
    if is_bagel != (kind == BAGEL):
        raise ConfigError(
            f"dataset_type {config.dataset_type!r} and processor_type {said['processor_type']!r} do not go together: "
            "sequences of images to see and to make are of dataset_type bagel and processor_type bagel"
        )
    if kind == BAGEL:
        bagel = build_config(BagelSettings, extra, source="processor_config.extra_kwargs")
        return ProcessorConfig(type="bagel", tokenizer=str(name), bagel=bagel, **trust)
    check_names(extra, OMNI_KEYS if kind == "omni" else MEDIA_KEYS, "processor_config.extra_kwargs")
    if dataset_type_of(config).kind == "text":
        return ProcessorConfig(type="text", tokenizer=str(name), **trust)
    if kind == "chat":
        if extra:
            raise ConfigError(
                f"processor_config.extra_kwargs {', '.join(extra)} is for images and videos, and processor_type "
                f"{said['processor_type']!r} reads text: leave it out"
            )
        return ProcessorConfig(type="chat", tokenizer=str(name), **trust)
    settings: dict[str, Any] = {} if kind == "audio" else _video_settings(config, said["processor_type"])
    settings |= extra
    if (config.extra_kwargs or {}).get("use_audio_in_video"):
        settings["use_audio_in_video"] = True
    return ProcessorConfig(type=kind, path=str(name), **trust, **settings)


def _image_config(said: Mapping[str, Any]) -> ProcessorConfig:
    """Return the config of an image processor; images need no folder, therefore processor_name is ignored."""
    found = _named(PROCESSORS, LATER_PROCESSORS, said.get("processor_type"), "processor_config.processor_type")
    if found.kind != "image":
        images = [name for name, each in PROCESSORS.items() if each.kind == "image"]
        raise ConfigError(
            f"processor_type {said['processor_type']!r} does not read images for generation: choose "
            f"{' or '.join(images)}"
        )
    extra = said.get("extra_kwargs") or {}
    check_names(extra, IMAGE_KEYS, "processor_config.extra_kwargs")
    return build_config(
        ProcessorConfig, {"type": "image", "crop": found.crop, **extra}, source="processor_config.extra_kwargs"
    )


def lacks_processor(config: EngineDatasetConfig) -> bool:
    """Return whether a config specifies only the type of its processor, to be loaded from the model's folder."""
    said = config.processor_config or {}
    type_of = PROCESSORS.get(str(said.get("processor_type")))
    return type_of is not None and type_of.kind != "image" and not said.get("processor_name")


def with_processor(config: EngineDatasetConfig, name: str) -> EngineDatasetConfig:
    """Return the config with the processor of a model's folder or hub id."""
    return replace(config, processor_config={**(config.processor_config or {}), "processor_name": name})


def reads_videos(config: EngineDatasetConfig) -> bool:
    """Return whether the processor of a config may read videos."""
    processor_type = str((config.processor_config or {}).get("processor_type"))
    if processor_type in OWN_PROCESSORS:
        return True
    if lacks_processor(config):
        return PROCESSORS[processor_type].kind != "chat"
    return processor_config_of(config).kind not in ("chat", "text", "tokens")


def processor_of(config: EngineDatasetConfig) -> Processor:
    """Return the processor of a config; ConfigError if the folder's family does not match processor_type."""
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
            f"processor_type {processor_type!r} is for a {wanted}, and {path} holds a {found}: change one of them"
        )


def _video_settings(config: EngineDatasetConfig, processor_type: str) -> dict[str, Any]:
    """Return settings of media. Qwen3-VL's pixel limits apply to all frames together, other limits to each frame."""
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


def _settings_of_llava(config: EngineDatasetConfig) -> dict[str, Any]:
    """Return settings with a fixed number of frames: equal for all videos, with one frame size."""
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
    limits = {name: value for name, value in pixels.items() if value is not None}  # refused by name in the processor
    frames = {"video_max_frames": config.video_max_frames, "frame_num": config.frame_num}
    chosen = {name: VIDEO_DEFAULTS[name] if value is None else value for name, value in frames.items()}
    return limits | chosen | settings


def _named(table: Mapping[str, Any], later: tuple[str, ...], name: Any, what: str) -> Any:
    if name in table:
        return table[name]
    if name is None:
        raise ConfigError(f"{what} is missing: choose one of {', '.join(table)}")
    if name in later:
        raise ConfigError(
            f"{what} {name!r} is not supported, because its model is a class of LMMS Engine: train it with LMMS "
            f"Engine, or choose one of {', '.join(table)}"
        )
    check_names([name], [*table], what)
    raise AssertionError(name)
