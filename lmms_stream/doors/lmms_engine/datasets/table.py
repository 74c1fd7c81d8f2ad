"""Fields of a DatasetConfig, and our equivalents of LMMS Engine's types, formats and processors.

`python -m lmms_stream.doors.lmms_engine.datasets.table > docs/datasets.md` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ....registry import imported
from .moot import NOT_CALLED
from .names import FORMATS, LATER_PROCESSORS, PROCESSORS, SHARDS, TYPES, VIDEO_DEFAULTS, EngineDatasetConfig

THEIRS = {
    "dataset_type": "which kind of dataset; without it, `remote` names shards",
    "dataset_format": "of what dataset_path names (default: told by name and content). `yaml`: a list of sources, in that file or in `datasets`. `mds`, or a URL without a format: shards that are there",
    "dataset_path": "a file, folder, glob or URL; with hf_dataset a hub id or a saved folder; with yaml the list",
    "datasets": "a list of sources `{path, data_folder, data_type}`, each with settings of its own (columns, tags, limit, …); it wins over dataset_path",
    "processor_config": "`{processor_name, processor_type, extra_kwargs}`: a folder or hub id, its type, and image_max_pixels, image_min_pixels, video_max_pixels, video_min_pixels, as the processor counts them, audio_max_length, in extra_kwargs or beside it, and trust_remote_code in extra_kwargs (in a launch file model_config's, too); of sit and rae_siglip no folder, and image_size, flip, augment_seed; of bagel a tokenizer, and the settings in docs/bagel.md",
    "packing": "whether samples share packs (fineweb_edu: True unless it is said); otherwise each pack is one sample",
    "packing_strategy": "first_fit, best_fit, even_fit, next_fit, window_N (balanced is taken as best_fit); MultiModalIterableDataset: first_fit (a pack is flushed when it is full), best_fit, balanced, others as first_fit",
    "packing_length": "tokens of a pack",
    "filter_overlong": "samples that are longer than a pack are left out, and counted; with False each is kept, a pack of its own",
    "filter_overlong_workers": "taken, and not needed: lengths are measured as sources are converted",
    "max_length": "longer samples are left out, and counted, as sources are converted; with filter_overlong: false they stay, as in LMMS Engine",
    "shuffle": "whether each epoch has an order of its own",
    "data_seed": "seed",
    "eval_dataset_path": "as dataset_path, of what is evaluated, with all other settings",
    "object_storage": "none, s3, gcs, azure: in a launch file the store of media, below data_folder, as in LMMS Engine; elsewhere the store of shards that are there, and new shards are refused (`cache_dir` keeps them in a store, `data_folder` of an entry of datasets names media). azure's account is AZURE_ACCOUNT_NAME",
    "bucket_name": "the bucket or container there",
    "video_sampling_strategy": "fps or frame_num: which of the two says how many frames a video has",
    "video_max_pixels": "of a frame; Qwen3-VL's processor has limits on all frames of a video besides, which extra_kwargs of processor_config set",
    "video_min_pixels": "the same; not of Qwen3-VL's processor",
    "video_max_frames": "at most",
    "frame_num": "frames of a video, equally far apart",
    "fps": "frames a second",
    "video_backend": "taken, and not needed: PyAV reads videos",
    "extra_kwargs": "packing_kwargs: num_open_buckets and fill_threshold of best_fit, num_buckets of balanced, of MultiModalIterableDataset on sources (elsewhere not needed); collator_type: not needed; use_audio_in_video: of Qwen-Omni's processors",
}
OURS = {
    "cache_dir": "folder or URL where sources are kept as shards (default: lmms_stream/datasets in ~/.cache)",
    "reshuffle": "whether packs are made anew in each epoch, instead of the same ones in another order",
    "on_error": "fail: a row that does not fit ends the run, by name; skip: it is left out, counted and listed",
    "remote": "folder or URL of shards, for a dataset without dataset_type",
    "local": "folder of this node where copies of remote shards lie",
    "num_parts": "read a dataset that has grown (`convert --append`) as it was with so many parts",
    "processor": "our own section, instead of processor_config",
    "packing_mode": "auto, plan or lanes",
    "packing_window": "samples that are packed together",
    "overlong": "error, drop, truncate, split or keep, instead of filter_overlong",
    "max_samples_per_pack": "at most",
    "seed": "of the epoch order",
    "num_canonical_nodes": "sections of the order; lanes (by default chosen from the bytes of sources and the readers)",
    "shuffle_block_size": "samples that are shuffled together",
    "fetch": "attempts, timeout_s, threads, ahead and cache_limit of downloads",
}
CALLED = {  # members of a dataset class that a subclass overrides -> fate and effect
    "load_from_json": (
        "called",
        "for each row, with the source's data_folder: it returns a row, several ([…]) or None. `super().load_from_json(row, data_folder)` is the row itself; tensors are made by a processor (register_processor). A conversion runs in one process then",
    ),
    "load_from_hf": ("called", "the same, with dataset_format hf_dataset"),
    "get_collator": ("called by your own DataLoader", "a trainer joins packs itself: give it data_collator"),
}
_FATES = {"honoured": "honoured", "moot": "cannot matter: a warning names it", "refused": "refused"}
_SHOWN = {"dataset_type": ("", ""), "filter_overlong": (True, False), "data_seed": (42, 0)}  # values without a default
_BY_TYPE = {"packing", "packing_length", "packing_strategy", "overlong", "seed", "reshuffle"}


def markdown() -> str:
    """Return the text of docs/datasets.md."""
    return "\n".join([*_head(), *_fields(), *_types(), *_members(), *_launch_files()]) + "\n"


def _head() -> Iterator[str]:
    yield "# Datasets of LMMS Engine"
    yield ""
    yield "What becomes of each field of a `DatasetConfig`, in Python and as the section `dataset` of a YAML file."
    yield "(`python -m lmms_stream.doors.lmms_engine.datasets.table > docs/datasets.md` writes this page.)"


def _fields() -> Iterator[str]:
    theirs, ours = EngineDatasetConfig(dataset_type="vision"), EngineDatasetConfig(remote="shards")
    for title, rows in (("Fields of LMMS Engine's", THEIRS), ("Fields of ours", OURS)):
        yield from (
            "",
            f"## {title}",
            "",
            "| field | default with dataset_type | without | what it is |",
            "|---|---|---|---|",
        )
        for name, text in rows.items():
            defaults = _SHOWN.get(name) or (VIDEO_DEFAULTS.get(name, getattr(theirs, name)), getattr(ours, name))
            shown = [
                f"`{each}`" if isinstance(each, str | int | float) and each not in ("", "shards") else ""
                for each in defaults
            ]
            if name in THEIRS and name not in _BY_TYPE | {"shuffle", "filter_overlong", "data_seed", "dataset_type"}:
                shown[1] = "is refused"
            yield f"| `{name}` | {shown[0]} | {shown[1]} | {text} |"


def _types() -> Iterator[str]:
    yield from ("", "## Types", "", "| dataset_type | rows |", "|---|---|")
    yield from (f"| `{name}` | {each.says} |" for name, each in TYPES.items())
    yield from ("", "## Processors", "", "| processor_type | ours | reads |", "|---|---|---|")
    for name, processor in PROCESSORS.items():
        reads = (
            f"a folder of a {processor.processor_class}"
            if processor.processor_class
            else f"images, {processor.crop} crop; extra_kwargs image_size, flip, augment_seed; no folder"
            if processor.kind == "image"
            else "a folder of a tokenizer with a chat template"
        )
        yield f"| `{name}` | `{processor.kind}` | {reads} |"
    yield f"| {_listed(LATER_PROCESSORS)} | | not there yet: refused by name |"
    yield from ("", "## Formats", "", f"{_listed(FORMATS)}; `{SHARDS}` are shards. Any URL of a store may be a path.")


def _members() -> Iterator[str]:
    yield from (
        "",
        "## Members of a dataset class",
        "",
        "| overridden member | | what becomes of it |",
        "|---|---|---|",
    )
    yield from (f"| `{name}` | {fate} | {text} |" for name, (fate, text) in CALLED.items())
    yield from (f"| `{name}` | refused in a subclass | {remedy} |" for name, remedy in NOT_CALLED.items())


def _launch_files() -> Iterator[str]:
    yield from (
        "",
        "## Launch files",
        "",
        "`lmms-stream train` takes LMMS Engine's launch files (`trainer_type`, `dataset_config`, `model_config`,",
        "`trainer_args`). Every key does something, is named once in a warning as one that cannot matter here, or is",
        "refused with the reason. Two that run, on chats and on chats about images:",
        "",
        "```bash",
        "python examples/prepare.py build",
        "lmms-stream train examples/lmms_engine.yaml",
        "python examples/prepare_charts.py build/charts",
        "lmms-stream train examples/lmms_engine_vision.yaml --nproc 2",
        "```",
        "",
        "`trainer_args` has the arguments of [transformers](arguments.md), too. Keys and values outside of the tables are",
        "refused by name.",
    )
    sections = imported("doors.lmms_engine.launch.file:KEYS")
    for title, keys in sections.items():
        yield from ("", f"### Keys of {title}", "", "| key | | what becomes of it, or why not |", "|---|---|---|")
        yield from (f"| `{name}` | {_FATES[key.fate]} | {key.text} |" for name, key in keys.items())


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(markdown())
