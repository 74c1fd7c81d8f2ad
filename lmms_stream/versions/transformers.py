"""Differences between versions of transformers, each with its last version. This module imports no library."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

_INSTALLED = tuple(int(part) for part in version("transformers").split(".")[:2])

# Until 5.0 Qwen3-Omni's processor cuts sounds at the chunk_length of its folder; later versions read whole sounds.
CUTS_SOUNDS_OF_QWEN3_OMNI = _INSTALLED < (5, 0)

# Until 5.0 settings in separate files override settings nested in processor_config.json; later the reverse.
NESTED_SETTINGS_COME_FIRST = _INSTALLED >= (5, 0)

# Until 5.18 Qwen2.5-VL's model rounds the seconds of a pair of frames down before it counts positions.
CUTS_SECONDS_OF_FRAMES = _INSTALLED < (5, 18)

# Until 5.18 LLaVA-OneVision's model adds the token that ends a video after the given features.
ENDS_FEATURES_OF_LLAVA_VIDEOS = _INSTALLED >= (5, 18)

# Until 5.23 chunks of Llama 4 count from the start of a pack; later from the start of each sample.
COUNTS_CHUNKS_BY_SAMPLE = _INSTALLED >= (5, 23)

# Until 5.9 sdpa and eager get no mask in Qwen3-Omni's tower of sound: clips see each other.
MIXES_CLIPS_OF_QWEN3_OMNI = _INSTALLED < (5, 9)

# Until 5.0 gpt-oss's experts get the weights of all experts for each token; later the weights of the chosen experts.
GIVES_WEIGHTS_OF_CHOSEN_EXPERTS = _INSTALLED >= (5, 0)

# Until 5.0 save_pretrained takes weights by their names in the model, and renames them.
KEEPS_NAMES: dict[str, Any] = {} if _INSTALLED < (5, 0) else {"save_original_format": False}

# Until 5.0 configs lack names of later configs, for example rope_parameters.
HAS_FORMER_CONFIGS = _INSTALLED < (5, 0)

# Words of plans for tensor parallelism: since 5.0, and until then.
_OF_PLANS = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}


def plan_of_cuts(model: Any) -> dict[str, str]:
    """Return a model's plan of tensor parallelism: names of parts, with * for numbers -> way to cut, in words of 4.57.

    The embedding is left out: since 5.0 plans cut its rows, but it may stay whole, as before.
    """
    # In 4.57 the config's plan of the blocks replaces the class's plan of the head.
    plans = (getattr(type(model), "_tp_plan", None), getattr(model, "_tp_plan", None))
    plan: dict[str, str] = {name: word for each in plans for name, word in (each or {}).items()}
    return {name: _OF_PLANS.get(word, word) for name, word in plan.items() if word != "embedding_rowwise"}


def in_float32(part: Any, name: str) -> bool:
    """Return whether a module's class keeps its parameter of a name in float32 when it is loaded in bfloat16.

    Until 5.0, and in diffusers, the class names components of the parameter's name; later it names patterns.
    """
    is_diffusers = type(part).__module__.startswith("diffusers.")
    kept = getattr(part, "_keep_in_fp32_modules" if is_diffusers else "_keep_in_fp32_modules_strict", None) or ()
    if is_diffusers or _INSTALLED < (5, 0):
        return any(f".{each}." in f".{name}." for each in kept)
    return any(re.search(each.replace("*", ".*"), name) for each in kept)


def special_tokens_of(tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer's special tokens by name. Since 5.0 special_tokens_map lacks tokens without their own name.

    Fingerprints of older lengths indexes contain all tokens.
    """
    named = dict(tokenizer.special_tokens_map)
    others = tokenizer.extra_special_tokens if _INSTALLED >= (5, 0) else ()
    return {**named, "additional_special_tokens": list(others)} if others else named


def by_torchvision(name: str) -> Any:
    """Return the image processor that resizes with torchvision. Until 5.0 its name differs from Pillow's."""
    return getattr(import_module("transformers"), name if _INSTALLED >= (5, 0) else f"{name}Fast")


@contextmanager
def without_progress() -> Iterator[None]:
    """Hide transformers' progress bars inside. Since 5.0 save_pretrained has a bar."""
    from transformers.utils import logging

    kept = logging._tqdm_active
    logging._tqdm_active = False
    try:
        yield
    finally:
        logging._tqdm_active = kept


def as_in_files(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors as in files. Until 5.0 unchanged; later, for example, a tensor per expert of a joined tensor."""
    if _INSTALLED < (5, 0):
        return tensors
    with _own_classes(model):
        made: dict[str, Any] = import_module("transformers.core_model_loading").revert_weight_conversion(model, tensors)
    return made


@contextmanager
def _own_classes(model: Any) -> Iterator[None]:
    """Give sharded parts of a model the classes of transformers inside."""
    from torch.distributed.fsdp import FSDPModule

    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, of_fsdp in sharded:
        module.__class__ = of_fsdp.__mro__[2]  # after FSDP's subclass, and FSDPModule
    try:
        yield
    finally:
        for module, of_fsdp in sharded:
            module.__class__ = of_fsdp


class MadeOf(NamedTuple):
    """Keys of files, and the conversion of their tensors to tensors of a model; None for a copy of a single tensor."""

    keys: tuple[str, ...]
    convert: Callable[[Sequence[Any]], dict[str, Any]] | None


HAS_RULES_FOR_NAMES = _INSTALLED >= (5, 0)


def made_of_files(model: Any, keys: Iterable[str]) -> list[tuple[str, MadeOf]]:
    """Return the names of a model's weights with their sources in files, as in from_pretrained since 5.0."""
    core = import_module("transformers.core_model_loading")
    rules = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renames = [each for each in rules if isinstance(each, core.WeightRenaming)]
    converters = [each for each in rules if isinstance(each, core.WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[tuple[str, str | None], list[tuple[str, str]]] = {}
    for key in sorted(keys, key=core.dot_natural_key):
        name, pattern = core.rename_source_key(key, renames, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = core.rename_source_key(key, [], [], prefix, state)
        found.setdefault((name, None if pattern else key), []).append((key, pattern))
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}

    def convert(name: str, parts: Sequence[tuple[str, str]], tensors: Sequence[Any]) -> dict[str, Any]:
        mapping = deepcopy(by_pattern[parts[0][1]])
        for (key, pattern), tensor in zip(parts, tensors, strict=True):
            mapping.add_tensor(name, key, pattern, tensor)
        made = mapping.convert(name, model=model, config=model.config)
        return {each: made[each][0] if isinstance(made[each], list) else made[each] for each in made}

    return [
        (name, MadeOf(tuple(key for key, _ in parts), None if copied else partial(convert, name, parts)))
        for (name, copied), parts in found.items()
    ]


def checkpoint_activations(model: Any) -> None:
    """Run a model's blocks again in the backward pass. Until 5.23 the method has another name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def attention_is_ours() -> Iterator[None]:
    """Allow our attention with "sdpa" in its name inside.

    Since 5.0, transformers refuses such a name for gpt-oss and other classes that do not support "sdpa".
    """
    from transformers import PreTrainedModel

    kept = PreTrainedModel._sdpa_can_dispatch
    PreTrainedModel._sdpa_can_dispatch = lambda self, is_init_check=False: True
    try:
        yield
    finally:
        PreTrainedModel._sdpa_can_dispatch = kept


# Names of arguments: until 5.23, and later.
_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def as_installed(said: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return arguments of any version by the names of the installed version. names: of its TrainingArguments.

    Since 5.0 warmup_steps may be a share of the run, formerly warmup_ratio. Other values do not change.
    """
    values = dict(said)
    for old, new in _RENAMED.items():
        other, known = (old, new) if new in names else (new, old)
        if other in values:
            values.setdefault(known, values.pop(other))
    if "warmup_ratio" in values and "warmup_ratio" not in names:
        ratio = values.pop("warmup_ratio")
        values["warmup_steps"] = values.get("warmup_steps") or ratio
    return values


@contextmanager
def masks_of_packs() -> Iterator[None]:
    """Make transformers create each mask inside for packs, by the positions of tokens in the pack.

    Since 5.0 transformers reads from the device, for each mask, whether there are several samples. Since 5.23 it
    numbers tokens from the start of their sample. Gemma 3's layers with windows use these numbers as positions in the
    pack: the mask of an image in the second sample would be at the same offset in the first sample. Only chunks (Llama
    4) keep the numbers by sample.
    """
    if _INSTALLED < (5, 0):
        yield
        return
    from transformers import masking_utils

    ours: dict[str, Any] = {"find_packed_sequence_indices": _samples_of_tokens}
    if _INSTALLED >= (5, 23):
        ours["chunked_causal_mask_function"] = partial(_in_chunks, masking_utils.chunked_causal_mask_function)
        ours["remap_positions_for_packed_sequence"] = partial(
            _by_sample_in_chunks, masking_utils.remap_positions_for_packed_sequence
        )
    kept = {name: getattr(masking_utils, name) for name in ours}
    vars(masking_utils).update(ours)
    try:
        yield
    finally:
        vars(masking_utils).update(kept)


def _samples_of_tokens(position_ids: Any) -> Any:
    """Return the number of each token's sample, int64[1, T], from 0; positions increase by 1 within a sample."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def _in_chunks(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mask_function = make(*args, **kwargs)
    mask_function.is_chunked = True
    return mask_function


def _by_sample_in_chunks(remap: Callable[..., Any], mask_function: Any, position_ids: Any) -> Any:
    return remap(mask_function, position_ids) if hasattr(mask_function, "is_chunked") else mask_function


def name_missing_output() -> None:
    """Let Llama 4 run: since 5.24 it reads image_outputs of its text model's output, which lacks this field."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if _INSTALLED >= (5, 24) and not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None


class RulesOfTokenizers(NamedTuple):
    """How a class of tokenizers reads a folder with a tokenizer.json.

    types: pattern of the types of models in config.json. tokens: special tokens without a name in the folder. decoder:
    replaces the decoder of the file. parts: digest of the parts by which the class replaces those of the file.
    needs_bytes: the rules are only for byte-level files.
    """

    types: str = r"(?!(mis|minis|mix|pix|vox)tral|qwen2$|qwen3_5|qwen4_exp|siglip2|hyperclovax_vision_v2).*"
    tokens: Mapping[str, str] = {}
    decoder: Mapping[str, Any] | None = None
    parts: str = ""
    needs_bytes: bool = False


_QWEN2 = RulesOfTokenizers(
    types=r"qwen2(_5)?(_vl|_omni|_audio|_moe)?|qwen3(_vl|_omni|_next|_asr)?(_moe)?",
    tokens=dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    parts="f427d05099eaa7da359056f77a7d62ac",
)
_GEMMA = RulesOfTokenizers(
    types=r"gemma[23]?n?(_text)?|t5gemma|shieldgemma2",
    tokens={f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
    parts="c99a753c13c9c0536a57dfefcfa49f8d",
)

# Class named by a folder -> its rules, those of 5.24. Other versions are asked.
RULES_OF_TOKENIZERS = {
    "PreTrainedTokenizerFast": RulesOfTokenizers(),
    "TokenizersBackend": RulesOfTokenizers(),
    "LlamaTokenizer": RulesOfTokenizers(needs_bytes=True),
    "Qwen2Tokenizer": _QWEN2,
    "GemmaTokenizer": _GEMMA,
}
if _INSTALLED != (5, 24):
    RULES_OF_TOKENIZERS = {}
