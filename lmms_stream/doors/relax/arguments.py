"""Relax's flags of rollout data, with Relax's defaults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError


def json_object(text: str) -> dict[str, Any]:
    """Parse the JSON object of a flag."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: write '{{\"NAME\": VALUE}}'")
    return value


# flag, type, default, help
_VALUES: tuple[tuple[str, Any, Any, str], ...] = (
    ("--prompt-data", str, None, "name .jsonl and .parquet files, folders or MDS datasets, each with @[START:STOP]"),
    ("--input-key", str, "input", "name the column of prompts"),
    ("--label-key", str, None, "name the column of labels"),
    ("--metadata-key", str, "metadata", "name the column of what goes along with a prompt"),
    ("--tool-key", str, "tools", "name the column of tools"),
    ("--multimodal-keys", json_object, None, 'name the columns of media, as {"image": COLUMN}'),
    ("--system-prompt", str, None, "say this before each prompt"),
    ("--apply-chat-template-kwargs", json_object, {}, "give the chat template these variables, as JSON"),
    ("--rollout-seed", int, 42, "shuffle by this seed"),
    ("--rollout-max-prompt-len", int, None, "drop prompts of more tokens"),
    ("--rollout-batch-size", int, None, "take so many prompts for a rollout"),
    ("--over-sampling-batch-size", int, None, "ask for so many prompts at a time (default: --rollout-batch-size)"),
    ("--n-samples-per-prompt", int, 1, "generate so many samples of each prompt"),
    ("--num-rollout", int, None, "make so many rollouts"),
    ("--num-epoch", int, None, "or go through the prompts so many times"),
    ("--start-rollout-id", int, None, "begin with this rollout"),
    ("--buffer-filter-path", str, None, "choose groups of the buffer by this function, as MODULE.NAME"),
    ("--data-source-path", str, "lmms_stream.rl.RolloutDataSourceWithBuffer", "take prompts from this class"),
    ("--dynamic-sampling-filter-path", str, None, "keep groups for which this function of (args, group) is true"),
    ("--rollout-sample-filter-path", str, None, "leave samples out of the loss by this function of (args, groups)"),
    ("--image-max-token-num", int, None, "shrink images to so many tokens (default: images as they are)"),
    ("--image-min-token-num", int, None, "enlarge images to so many tokens"),
    ("--opd-teacher-prompt-key", str, None, "name the column of what a teacher is asked"),
    ("--opd-teacher-image-key", str, None, "name the column of the images that a teacher is shown"),
    ("--eval-input-key", str, None, "name the column of prompts of --eval-prompt-data (default: --input-key)"),
    ("--eval-label-key", str, None, "name the column of their labels (default: --label-key)"),
    ("--eval-tool-key", str, None, "name the column of their tools (default: --tool-key)"),
    ("--eval-max-prompt-len", int, None, "drop those of more tokens"),
    ("--n-samples-per-eval-prompt", int, 1, "generate so many samples of each of them"),
    ("--custom-prompt-path", str, None, "change each prompt by this function of (prompt, row), as MODULE.NAME"),
    ("--prompt-cache-limit", str, None, "copy so much of prompts in stores to this node, as 20gb (default: no limit)"),
    ("--streaming-buffer-size", int, 10000, "keep so many samples that were made, with --use-streaming-dataset"),
    ("--prefetch-chunk-size", int, 32, "make so many rows together in the background"),
    ("--prefetch-max-cached", int, 256, "make at most so many rows ahead (0: none)"),
    ("--prefetch-num-workers", int, 1, "make them in so many threads"),
)
_SWITCHES: tuple[tuple[str, str], ...] = (
    ("--apply-chat-template", "make texts of prompts by the tokenizer's chat template"),
    ("--rollout-shuffle", "read the prompts of each epoch in another order"),
    ("--use-streaming-dataset", "make samples when they are asked for, instead of all at the start"),
    ("--sort-prompts-by-length", "give long prompts first, among those that are asked for together"),
    ("--partial-rollout", "go on with unfinished responses, instead of beginning them anew"),
    ("--mask-offpolicy-in-partial-rollout", "leave out of the loss what earlier rollouts have generated"),
    ("--trust-remote-code", "run the Python files in the folder of the tokenizer and the processor"),
    ("--use-audio-in-video", "hear the sound of videos, which is not supported yet"),
)
_DEFAULTS = {
    **{flag[2:].replace("-", "_"): default for flag, _, default, _ in _VALUES},
    **{flag[2:].replace("-", "_"): False for flag, _ in _SWITCHES},
    "eval_prompt_data": None,
    "rollout_global_dataset": True,
    "hf_checkpoint": None,
    "save": None,
    "load": None,
}


def add_data_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add Relax's flags of rollout data to the parser and return it. Existing flags of the parser stay unchanged."""
    known = set(parser._option_string_actions)
    group = parser.add_argument_group("rollout data")
    for flag, kind, default, what in _VALUES:
        if flag not in known:
            group.add_argument(flag, type=kind, default=default, help=what.replace("%", "%%"))
    if "--eval-prompt-data" not in known:
        group.add_argument("--eval-prompt-data", nargs="+", metavar="NAME PATH", help="evaluate with these prompts")
    for flag, what in _SWITCHES:
        if flag not in known:
            group.add_argument(flag, action="store_true", help=what)
    if "--disable-rollout-global-dataset" not in known:
        group.add_argument(
            "--disable-rollout-global-dataset",
            dest="rollout_global_dataset",
            action="store_false",
            help="read no prompts: give empty samples",
        )
    return parser


# Settings of Relax that change prompts or their media and have no effect here.
_UNHEARD = (
    "audio_sample_rate", "dump_details", "frame_factor", "image_resize_scale_factor", "opd_teacher_audio_key",
    "opd_teacher_video_key", "video_fps", "video_fps_max_frames", "video_fps_min_frames", "video_max_token_num",
    "video_min_token_num",
)  # fmt: skip


def refuse_unheard(args: Any, names: Sequence[str] = _UNHEARD) -> None:
    """Raise ConfigError if args set an unsupported setting of Relax."""
    given = [name for name in names if getattr(args, name, None) not in (None, False)]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')} ({name})" for name in given)
        raise ConfigError(
            f"{flags}: not supported, and would have no effect on prompts: leave it out, or prepare the rows (media of "
            "the wanted size), or apply it in your own function"
        )


def setting(args: Any, name: str) -> Any:
    """Return a setting by name, or its default if args do not have it."""
    if name not in _DEFAULTS:
        raise ConfigError(f"{name} is no setting of rollout data")
    return getattr(args, name, _DEFAULTS[name])
