"""A tiny model of every type that transformers has, and whether it trains on packs.

`python -m tests.train.every_model causal` prints a row for each type of causal language model as JSON, `image_text` for
each that reads images too (in packs of text), and `table` the lines of docs/families.md. `hybrids` prints the page's
table of models with layers run on each sample alone: differences in float32, and CPU time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from lmms_stream.errors import ConfigError
from lmms_stream.loader.collate import collate
from lmms_stream.train.model.attention import implementations, may_be_set
from lmms_stream.train.model.choice import prove_packing
from lmms_stream.train.model.model import PackedModel
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..versions import IS_5
from .one_by_one import gradients_of
from .vision import losses_of, plain_logits

KINDS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "image_text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
}
UNBUILT = (
    LookupError, ValueError, OSError, TypeError, ImportError, RuntimeError, AttributeError, AssertionError,
    StrictDataclassClassValidationError,
)  # fmt: skip
VOCABULARY = 512
ATTENTIONS = ("sdpa_varlen", "sdpa", "eager")  # that train on the CPU
# Names of a config's fields, and the most that they are here.
MOST = {
    r"(max_)?(hidden_size|d_model|n_embd|dim|model_dim|embed_dim|embedding_dim|hidden_dim|width|dim_model|embedding_size"
    r"|word_embed_dim|emb_dim|lm_hidden_size)": 64,
    r"(.*_)?(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|d_inner|mlp_dim|dim_ff)(_mlp)?": 96,
    r"(.*_)?(num_hidden_layers|n_layers?|num_layers|depth|num_blocks)|(encoder|decoder)_layers": 2,
    r"(.*_)?(num_attention_heads|n_heads?|num_heads|attention_heads)": 4,
    r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads)": 2,
    r"(.*_)?vocab_size(_per_layer_input)?": VOCABULARY,
    r"(.*_)?(head_dim|head_size|attention_head_dim|dim_head)|kv_channels|d_kv|head_dim_.*": 16,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|n_experts": 4,
    r"num_experts_per_to(k|ken)|experts_per_token|moe_topk|top_k_experts|moe_top_k|num_selected_experts|moe_k": 2,
    r"(.*_)?lora_rank|hidden_size_per_layer_input|hc_lowrank": 16,
    r"n_groups?|num_expert_groups?|n_expert_groups": 2,
    r"topk_group": 1,
    r"image_size|input_size": 32,
    r"sliding_window|window_size|attention_window|attention_window_size|index_topk|local_attention"
    r"|attention_chunk_size": 16,
    r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length": 1024,
}
TRAINED = ("samples kept apart by positions and bounds", "some layers run on each sample alone")
REFUSED = {
    "takes no position_ids": "refused: positions are counted from the start of the pack",
    "does not keep": "refused: samples of a pack see one another",
}
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")  # a kind for each layer
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 96}
_INDEXER = {f"indexer_{name}": value for name, value in
            {"n_heads": 4, "kv_heads": 1, "head_dim": 16, "budget": 16, "compress_ratio": 4}.items()}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_WINDOWS = dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
_AXES: dict[str, Any] = (
    {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
    if IS_5
    else {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
)
_HALF_AXES = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
_UPPER: dict[str, Any] = {
    "use_sliding_window": True, "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
# What a type needs besides.
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_chunk_size": 16},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": _WINDOWS, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": _EXPERTS,
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8,
    },
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), _HALF_AXES),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gptj": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 32},
    "mamba2": {"num_heads": 8, "state_size": 16, "chunk_size": 16},
    "ministral": {"head_dim": 16},
    "mistral4": {"head_dim": 32, "qk_head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        **_EXPERTS, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 96,
    },
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), _AXES),
    "qwen4_exp_text": _INDEXER,
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3"), _UPPER),
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "reformer": {"axial_pos_shape": [32, 32], "axial_pos_embds_dim": [32, 32]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_dt_rank": 8,
    },
}  # fmt: skip


def tiny_config(config_class: Any, fields: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """The default config of a class with small numbers: layers of each kind that it has, in two layers or more."""
    default = config_class()
    fields = deepcopy(FIELDS.get(default.model_type, {})) | dict(fields or {})  # configs change what they are given
    own, made = vars(default), _small(default.to_dict())
    if "num_key_value_heads" in own and (
        "kv_lora_rank" in own or own["num_key_value_heads"] == own.get("num_attention_heads")
    ):
        made["num_key_value_heads"] = made.get("num_attention_heads", own["num_key_value_heads"])
    if "is_decoder" in own:
        made["is_decoder"] = True
    kinds = {name: list(dict.fromkeys(own[name])) for name in LISTS if isinstance(own.get(name), list) and own[name]}
    if kinds:
        number = made["num_hidden_layers"] = max(2, *map(len, kinds.values()))
        made |= {name: (each * number)[:number] for name, each in kinds.items()}
    if section := _section(default, made):
        made["rope_parameters" if IS_5 else "rope_scaling"] = section
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            made[name] = tiny_config(type(part), fields.pop(name, {})).to_dict()
    config: PretrainedConfig = config_class(**made | fields)
    return config


def _small(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        most = next((most for pattern, most in MOST.items() if re.fullmatch(pattern, name)), None)
        if most is not None and value > most:
            found[name] = most
        elif name.endswith(("_token_id", "_token_index")) and value >= VOCABULARY:
            found[name] = VOCABULARY - 1 - sum(map(ord, name)) % 100
    return found


def _section(default: Any, made: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rotary settings of positions with axes, which share the numbers of a small head."""
    rope = dict(getattr(default, "rope_parameters", None) or getattr(default, "rope_scaling", None) or {})
    if "mrope_section" not in rope:
        return None
    size = made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]
    half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
    return rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


def build(kind: str, model_type: str, attention: Any = "auto", **fields: Any) -> PreTrainedModel:
    """A tiny model of a type with random weights, with the implementations of attention to try, or the one named."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = getattr(modeling_auto, KINDS[kind][1])[config_class]
    config: Any = tiny_config(config_class, fields)
    if kind == "causal" and not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    torch.manual_seed(0)
    model: Any = model_class(config).float()
    choices, model.attention_left_out = implementations(attention, model_class, config)
    model.attention_choices = choices if attention == "auto" else []
    if attention != "auto":
        with may_be_set(attention):
            model.set_attn_implementation(attention)
    return model


def narrow_types() -> list[str]:
    """The causal language models of which a layer does not see all before it, or not by its scores alone."""
    every = getattr(modeling_auto, KINDS["causal"][0])
    return [each for each in every if not each.endswith("_assistant") and _narrow(each)]  # which need other inputs


def _narrow(model_type: str) -> str:
    """In words; nothing for the others."""
    try:
        model = build("causal", model_type)
    except UNBUILT:
        return ""
    config: Any = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    found = {
        "windows": ("sliding_attention" in kinds and getattr(config, "sliding_window", None))
        or "local" in getattr(config, "attention_layers", ()),
        "chunks": "chunked_attention" in kinds,
        "sinks": any(name.endswith(".sinks") for name, _ in model.named_parameters()),
        "a softcap": getattr(config, "attn_logit_softcapping", None),
    }
    return ", ".join(name for name, is_so in found.items() if is_so)


def rows(kind: str, model_types: list[str]) -> Iterator[dict[str, Any]]:
    """How each type trains on packs, or why it does not."""
    for model_type in model_types or getattr(modeling_auto, KINDS[kind][0]):
        row: dict[str, Any] = {"model_type": model_type}
        begun = time.perf_counter()
        try:
            model = build(kind, model_type)
        except UNBUILT as error:
            yield row | {"unbuilt": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            continue
        packed = PackedModel(model)
        try:
            prove_packing(packed, device=torch.device("cpu"))
        except ConfigError as error:
            row["refused"] = str(error)
        else:
            row |= {"attention": model.config._attn_implementation, "kept_apart": packed.kept_apart}
        yield row | {"seconds": round(time.perf_counter() - begun, 1)}


def table() -> str:
    """The lines of docs/families.md on the models of the installed transformers."""
    lines = []
    for kind, name in {"causal": "causal language models", "image_text": "models of images and text"}.items():
        found = list(rows(kind, []))
        groups: dict[str, list[str]] = {}
        for row in found:
            groups.setdefault(_group(row), []).append(row["model_type"])
        trained = {how: types for how, types in groups.items() if how in TRAINED}
        number, plain = sum(map(len, trained.values())), len(groups.get(TRAINED[0], []))
        packs = "packs of text" if kind == "image_text" else "packs"
        lines += [
            f"Of {len(found)} {name}, {number} train on {packs}, {plain} of them without a layer run by sample.",
            "",
            "| | models |",
            "|---|---|",
            *(f"| {how} | {', '.join(f'`{each}`' for each in types)} |" for how, types in sorted(groups.items())),
            "",
        ]
    return "\n".join([*lines, *_lines_of_narrow()])


def _lines_of_narrow() -> list[str]:
    """With which attention each model trains on packs of which a layer does not see all before it."""
    groups: dict[tuple[str, str], list[str]] = {}
    for model_type in narrow_types():
        passed = []
        for attention in ATTENTIONS:
            try:
                prove_packing(PackedModel(build("causal", model_type, attention)), device=torch.device("cpu"))
            except ConfigError:
                continue
            passed.append(f"`{attention}`")
        if passed:
            groups.setdefault((_narrow(model_type), ", ".join(passed)), []).append(f"`{model_type}`")
    rows = [f"| {narrow} | {passed} | {', '.join(types)} |" for (narrow, passed), types in sorted(groups.items())]
    title = "Layers that see only a part of the earlier tokens, and scores with sinks or a softcap:"
    return [title, "", "| layers have | attention in packs | models |", "|---|---|---|", *rows, ""]


LENGTHS = (150, 97, 80, 61, 44, 40, 23, 17)  # tokens of the samples of the pack of hybrids


def hybrids(model_types: list[str]) -> Iterator[str]:
    """Yield the table of hybrids of docs/families.md: differences of packs from their samples, and slowdown."""
    yield "| model | layers run by sample | kernels take bounds | loss | gradient | slowdown |"
    yield "|---|---|---|---|---|---|"
    for row in rows("causal", model_types):
        if "kept_apart" not in row or _group(row) != TRAINED[1]:
            continue
        model_type = row["model_type"]
        packed, plain = PackedModel(build("causal", model_type).eval()), build("causal", model_type).eval()
        prove_packing(packed, device=torch.device("cpu"))
        assert packed.by_sample is not None
        loss, gradient, slowdown = _measured(packed, plain)
        kernels = "yes" if _kernels_take_bounds(model_type) else "no"
        names = ", ".join(f"`{each}`" for each in packed.by_sample.names)
        yield f"| `{model_type}` | {names} | {kernels} | {loss:.0e} | {gradient:.0e} | {slowdown:.1f} |"


def _kernels_take_bounds(model_type: str) -> bool:
    """Return whether a model passes the proof with only the bounds, by the stand-ins of kernels_job."""
    command = [sys.executable, "-m", "tests.train.kernels_job", model_type]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode == 0 and "given the bounds" in json.loads(done.stdout)[model_type]["kept_apart"]


def _measured(packed: PackedModel, plain: Any) -> tuple[float, float, float]:
    """Return the largest differences of loss and gradients, and the time of a pack over that of one long sample.

    A gradient is compared with its norm, of 0.1 or more. The times are medians of CPU seconds of three rounds.
    """
    rng = np.random.default_rng(0)
    samples: Any = [{"input_ids": ids, "labels": ids} for ids in (rng.integers(5, 200, each) for each in LENGTHS)]
    ids = np.concatenate([each["input_ids"] for each in samples])
    batch, one = collate(samples, range(len(samples))), collate([{"input_ids": ids, "labels": ids}], [0])
    alone = torch.stack([losses_of(plain_logits(plain, each, family=None), each) for each in samples]).sum()
    alone.backward()

    def run(of: Any) -> float:
        packed.model.zero_grad()
        begun = time.process_time()
        loss = packed(of).tokens.sum()
        loss.backward()
        times[of is batch].append(time.process_time() - begun)
        return float(loss.detach())

    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(4):
        run(one)
        loss = run(batch)
    found, expected = gradients_of(packed.model), gradients_of(plain)
    gradient = max(float((found[name] - each).norm() / max(float(each.norm()), 0.1)) for name, each in expected.items())
    apart, mixed = (statistics.median(times[each][1:]) for each in (True, False))
    return abs(loss / float(alone.detach()) - 1), gradient, apart / mixed


def _group(row: Mapping[str, Any]) -> str:
    if "unbuilt" in row:
        return "not tried: no small model can be made of its default config"
    if "refused" in row:
        return next(
            (words for part, words in REFUSED.items() if part in row["refused"]), "refused: it needs other inputs"
        )
    return TRAINED[0] if row["kept_apart"].startswith("by ") else TRAINED[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "table", "hybrids"])
    parser.add_argument("model_types", nargs="*")
    options = parser.parse_args()
    if options.kind == "table":
        sys.stdout.write(table())
        return
    if options.kind == "hybrids":
        torch.set_num_threads(1)
        found: Iterator[str] = hybrids(options.model_types)
    else:
        found = map(json.dumps, rows(options.kind, options.model_types))
    for line in found:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
