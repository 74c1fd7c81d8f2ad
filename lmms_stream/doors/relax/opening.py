"""Rollout arguments -> datasets and functions."""

from __future__ import annotations

import importlib
from typing import Any

from ...checks import plain_path
from ...errors import ConfigError
from ...processors.tokenizers import check_trusted, load_tokenizer
from .arguments import refuse_unheard, setting
from .base import BaseDataset
from .dataset import Dataset
from .prompts import MultimodalConfig
from .streaming import StreamingDataset


def load_function(path: str) -> Any:
    """Import MODULE.NAME; ConfigError if the import fails."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be imported ({error}): name a function as MODULE.NAME") from error


def filter_samples(args: Any, groups: Any) -> None:
    """Call the function of --rollout-sample-filter-path; the function sets remove_sample of samples without a loss."""
    path = setting(args, "rollout_sample_filter_path")
    if path is not None:
        load_function(path)(args, groups)


def open_dataset(args: Any, **given: Any) -> BaseDataset:
    """Open the dataset named by args. given: settings that override args."""
    refuse_unheard(args)
    if setting(args, "prompt_data") is None:
        raise ConfigError("there are no prompts: set --prompt-data, or --disable-rollout-global-dataset")
    max_length, tokenizer = setting(args, "rollout_max_prompt_len"), given.get("tokenizer")
    settings = {**_settings(args, max_length=max_length, tokenizer=tokenizer), **_of_teacher(args), **given}
    if not setting(args, "use_streaming_dataset"):
        return Dataset(setting(args, "prompt_data"), **settings)
    return StreamingDataset(
        setting(args, "prompt_data"),
        **settings,
        buffer_size=setting(args, "streaming_buffer_size"),
        prefetch_chunk_size=setting(args, "prefetch_chunk_size"),
        prefetch_max_cached=setting(args, "prefetch_max_cached"),
        prefetch_num_workers=setting(args, "prefetch_num_workers"),
    )


def open_eval_datasets(args: Any) -> dict[str, BaseDataset]:
    """Open the datasets of --eval-prompt-data; return name -> dataset."""
    refuse_unheard(args)
    refuse_unheard(args, ["eval_config"])
    named = setting(args, "eval_prompt_data") or []
    if len(named) % 2:
        raise ConfigError(f"--eval-prompt-data has {len(named)} words: write pairs of NAME PATH")
    settings = _settings(args, max_length=setting(args, "eval_max_prompt_len"))
    for name, ours in (("input", "prompt_key"), ("label", "label_key"), ("tool", "tool_key")):
        settings[ours] = setting(args, f"eval_{name}_key") or settings[ours]
    return {name: Dataset(path, **settings) for name, path in zip(named[::2], named[1::2], strict=True)}


def _settings(args: Any, *, max_length: int | None, tokenizer: Any = None) -> dict[str, Any]:
    template = setting(args, "apply_chat_template")
    checkpoint, keys = setting(args, "hf_checkpoint"), setting(args, "multimodal_keys")
    if checkpoint is None and tokenizer is None and (template or max_length is not None or keys):
        raise ConfigError(
            "--apply-chat-template, --rollout-max-prompt-len, --eval-max-prompt-len and --multimodal-keys need "
            "hf_checkpoint (--hf-checkpoint): name the folder or hub id of the model"
        )
    function, trusts = setting(args, "custom_prompt_path"), setting(args, "trust_remote_code")
    named = load_tokenizer(checkpoint, trust_remote_code=True) if trusts and checkpoint else checkpoint
    limits = [setting(args, name) for name in ("image_max_token_num", "image_min_token_num")]
    return {
        "tokenizer": named if tokenizer is None else tokenizer,
        "processor": _processor(checkpoint, trusts) if keys and tokenizer is None else None,
        "max_length": max_length,
        "prompt_key": setting(args, "input_key"),
        "multimodal_keys": keys,
        "label_key": setting(args, "label_key"),
        "tool_key": setting(args, "tool_key"),
        "metadata_key": setting(args, "metadata_key"),
        "system_prompt": setting(args, "system_prompt"),
        "seed": setting(args, "rollout_seed"),
        "apply_chat_template": template,
        "apply_chat_template_kwargs": setting(args, "apply_chat_template_kwargs"),
        "use_audio_in_video": setting(args, "use_audio_in_video"),
        "multimodal_config": None if limits == [None, None] else MultimodalConfig.from_args(args),
        "custom_prompt_func": None if function is None else load_function(function),
        "cache_limit": setting(args, "prompt_cache_limit"),
    }


def _of_teacher(args: Any) -> dict[str, Any]:
    image_key = setting(args, "opd_teacher_image_key")
    keys = None if image_key is None else {"image": image_key}
    return {"teacher_prompt_key": setting(args, "opd_teacher_prompt_key"), "teacher_multimodal_keys": keys}


def _processor(path: str, trusts: bool) -> Any:
    """Load a processor of transformers; it counts the tokens of images."""
    from transformers import AutoProcessor

    path = str(plain_path("hf_checkpoint", path))
    try:
        return AutoProcessor.from_pretrained(path, trust_remote_code=trusts)
    except (OSError, ValueError) as error:
        check_trusted(error, path, trusts)
        raise ConfigError(
            f"processor {path!r} cannot be loaded ({str(error).splitlines()[0]}): name another processor"
        ) from error


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Load the media processor of a folder or hub id, like Relax; None if the model has no processor."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        found = AutoProcessor.from_pretrained(name_or_path, **{"trust_remote_code": False, **kwargs})
    except (OSError, ValueError) as error:
        check_trusted(error, name_or_path, bool(kwargs.get("trust_remote_code")))
        return None
    return found if isinstance(found, ProcessorMixin) else None
