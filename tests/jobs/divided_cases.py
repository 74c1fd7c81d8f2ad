"""Steps of models that ranks divide, by tensor, expert or sequence parallelism, and of mixtures of experts: the cases.

A case names its model, settings and data, and the world sizes that it runs on: fewer in short rounds. A refused case
has the error, or its beginning before "…".
"""

from __future__ import annotations

from shutil import which
from typing import Any

import numpy as np

from tests.conftest import TokensAndSpans
from tests.rounds import rounds
from tests.versions import IS_5

from ..versions import declared
from .test_sharding import HYBRID, SIZES, TIED, VISION
from .test_sharding import LORA as TIED_LORA

ROUTER_WEIGHT = 0.3
TP: dict[str, Any] = {"tensor_parallel": 2}
EP: dict[str, Any] = {"expert_parallel": 2}
HALVES, QUARTERS = {"sequence_parallel": 2}, {"sequence_parallel": 4}
ON_2, ON_4 = rounds([], [2]), rounds([], [4])  # in long rounds alone
NO_LOSS: dict[str, Any] = {"router_aux_loss_coef": 0.0}  # which plain transformers adds by batch
ONE: dict[str, Any] = {"num_hidden_layers": 1}
Cases = dict[str, dict[str, Any]]


def of_type(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"config": {"model_type": model_type, **SIZES, **fields}, "seed": 3}


def short_samples(shortest: int) -> list[TokensAndSpans]:
    """Samples of at most 6 tokens, of which the first is not learnt."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(shortest, 7, 20)
    return [(rng.integers(5, 131, n).astype(np.int32), np.array([[1, n]], np.int32)) for n in lengths]


# Packs of a sample or two, and of one: no rank has tokens for all experts, some for none of theirs.
SHORT, SINGLE = {"data": "short", "packing_length": 8}, {"data": "single", "packing_length": 7}

# Mixtures of experts, of which no rank uses all; each rank has all of them.
ROUTED_FIELDS = {"num_experts_per_tok": 2, "router_aux_loss_coef": ROUTER_WEIGHT}
EXPERTS = {"config": {"model_type": "mixtral", "num_local_experts": 8, **ROUTED_FIELDS, **SIZES}}
QWEN_FIELDS = {"num_experts": 8, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "head_dim": 8}
QWEN = {"config": {"model_type": "qwen3_moe", **QWEN_FIELDS, **ROUTED_FIELDS, **SIZES}}
EXPERTS_LORA = {
    "config": QWEN["config"] | ONE, "adapter": {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
}  # fmt: skip
OF_EXPERTS: Cases = {
    "experts": {**SHORT, "model": EXPERTS, "on": rounds([2], [1, 2, 4])},
    "experts-padded": {**SHORT, "model": EXPERTS, "train": {"pad_to": 24, "per_device_batch": 2}, "on": [2]},
    "experts-again": {**SHORT, "model": EXPERTS, "train": {"gradient_checkpointing": True}, "on": [2]},
    "experts-older": {**SHORT, "model": EXPERTS, "older_torch": True, "on": rounds([2], [1, 2])},  # FSDP2 without zeros
    "experts-qwen": {**SHORT, "model": QWEN, "on": rounds([2], [1, 2, 4])},
    "experts-copies": {**SHORT, "model": QWEN, "train": {"shard_ranks": 2}, "on": ON_4},
    "experts-lora": {**SHORT, "model": EXPERTS_LORA, "on": rounds([2], [1, 2])},
}

# Matrices cut over ranks.
OPT = {"config": declared({"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}), "seed": 3}
LLAMA = of_type("llama")
LORA = {**LLAMA, "adapter": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}}
DORA = {**LLAMA, "adapter": {"r": 4, "target_modules": "all-linear", "use_dora": True}}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
QWEN2_MOE = of_type("qwen2_moe", **MOE, **NO_LOSS, shared_expert_intermediate_size=16)
ROUNDED = 0.05  # in bfloat16
OF_MATRICES: Cases = {
    # An odd vocabulary, whose head stays whole, and tied to the embedding; biases of what is cut.
    "cut-qwen2": {"model": of_type("qwen2", tie_word_embeddings=True), "train": TP, "on": [4]},
    "cut-llama": {"model": of_type("llama", **ONE, vocab_size=132), "train": {**TP, "shard_ranks": 1}, "on": [4]},
    # Its experts are in one parameter for all of a block since transformers 5.
    "cut-mixtral": {
        "model": of_type("mixtral", num_local_experts=4, **NO_LOSS), "train": TP, "on": rounds([2] * IS_5, [4])
    },
    # Norms of each head.
    "cut-qwen3": {"model": of_type("qwen3", head_dim=8), "train": {**TP, "gradient_checkpointing": True}, "on": ON_4},
    "cut-phi3": {"model": of_type("phi3"), "train": TP, "on": ON_4},  # joined outputs
    "cut-gemma2": {"model": of_type("gemma2", head_dim=8, vocab_size=132), "train": TP, "on": ON_4},
    "cut-gemma3": {"model": of_type("gemma3_text", head_dim=8, vocab_size=132), "train": TP, "on": ON_4},
    "cut-olmo2": {"model": of_type("olmo2"), "train": TP, "on": ON_4},
    "cut-smollm3": {"model": of_type("smollm3"), "train": TP, "on": ON_4},
    "cut-starcoder2": {"model": of_type("starcoder2"), "train": TP, "on": ON_4},
    "cut-glm4": {"model": of_type("glm4", head_dim=8), "train": TP, "on": ON_4},
    "cut-qwen3_moe": {"model": of_type("qwen3_moe", **MOE, **NO_LOSS), "train": TP, "on": ON_4},
    "cut-qwen2_moe": {"model": QWEN2_MOE, "train": TP, "on": ON_4 * IS_5},
    "cut-deepseek_v3": {"model": of_type("deepseek_v3", **DEEPSEEK, **NO_LOSS), "train": TP, "on": ON_4 * IS_5},
    "cut-qwen2_vl": {"model": VISION, "train": TP, "on": ON_4},
    "cut-frozen": {"model": LLAMA, "train": {**TP, "frozen": ["lm_head.*", "*.layers.0.*"]}, "on": ON_4},
    "cut-small": {
        "model": {**of_type("llama", vocab_size=132), "dtype": "bfloat16"}, "train": TP, "on": ON_4, "bound": ROUNDED
    },
    "cut-mixed": {
        "model": of_type("llama", vocab_size=132), "train": {**TP, "bf16": True}, "on": ON_4, "bound": ROUNDED
    },
    "cut-lora": {"model": LORA, "train": TP, "on": ON_4},
    "cut-lora-small": {
        "model": {**LORA, "dtype": "bfloat16"}, "train": {**TP, "gradient_checkpointing": True}, "on": ON_4,
        "bound": 0.1,
    },
    "cut-four": {"model": of_type("llama", num_key_value_heads=4), "train": {"tensor_parallel": 4}, "on": ON_4},
    "cut-eager": {"model": {**LLAMA, "attention": "eager"}, "train": TP, "on": ON_4},
    "cut-padded": {"model": LLAMA, "train": {**TP, "per_device_batch": 2, "pad_to": 160}, "on": ON_4},
}  # fmt: skip


# Experts on different ranks.
def gpt_oss(**fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "head_dim": 8, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], **NO_LOSS,
    }  # fmt: skip
    return of_type("gpt_oss", **{**own, **fields})


def llama4(**fields: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "head_dim": 8, "intermediate_size": 16, "intermediate_size_mlp": 32, "num_local_experts": 4,
        "num_experts_per_tok": 1, "attention_chunk_size": 512, "interleave_moe_layer_step": 1,
    }  # fmt: skip
    return of_type("llama4_text", **{**own, **fields})


def with_images() -> dict[str, Any]:
    """Llama 4 with its tower, which no text runs."""
    text = {name: value for name, value in llama4()["config"].items() if name != "model_type"}
    tower = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
        "patch_size": 7, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    }  # fmt: skip
    config = {"model_type": "llama4", "text_config": text, "vision_config": tower, "image_token_index": 1}
    return {"config": config, "seed": 3}


ROUTED = gpt_oss(router_aux_loss_coef=ROUTER_WEIGHT)
MIXTRAL = of_type("mixtral", num_local_experts=4, **NO_LOSS)
QWEN3_MOE = of_type("qwen3_moe", **MOE, **NO_LOSS)
ADAPTER = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
ADAPTER_OF_EXPERTS = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
GLM = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
AT_ALL_RANKS = {"expert_parallel": 4}
OF_RANKS_EXPERTS: Cases = {
    "apart-gpt_oss": {**SINGLE, "model": ROUTED, "train": {**EP, "gradient_checkpointing": True}, "on": [4]},
    "apart-llama4": {**SINGLE, "model": llama4(), "train": EP, "on": rounds([2], [2, 4])},
    # With all of a block's experts in one parameter, and a plan, since transformers 5.
    "apart-mixtral": {**SINGLE, "model": MIXTRAL, "train": EP, "on": rounds([2], [4]) * IS_5},
    "apart-all-ranks": {**SINGLE, "model": ROUTED, "train": AT_ALL_RANKS, "on": ON_4},
    "apart-again": {**SINGLE, "model": ROUTED, "train": {**AT_ALL_RANKS, "gradient_checkpointing": True}, "on": ON_4},
    "apart-copies": {**SINGLE, "model": ROUTED, "train": {**EP, "shard_ranks": 2}, "on": ON_4},
    "apart-padded": {
        **SINGLE, "model": ROUTED, "train": {**EP, "pad_to": 24, "per_device_batch": 2, "global_batch": 8}, "on": ON_4
    },
    "apart-older": {**SINGLE, "model": ROUTED, "train": EP, "older_torch": True, "on": ON_4},
    # Packs of several samples.
    "packed-gpt_oss": {"model": gpt_oss(), "train": EP, "on": ON_4},
    "packed-llama4": {
        "model": llama4(), "train": {**EP, "gradient_checkpointing": True, "per_device_batch": 2}, "on": ON_4
    },
    "packed-dense-layers": {"model": llama4(interleave_moe_layer_step=2), "train": EP, "on": ON_4},
    "packed-copies": {"model": llama4(), "train": {**EP, "shard_ranks": 2}, "on": ON_4},
    "packed-images": {"model": with_images(), "train": EP, "on": ON_4},
    "packed-tokens": {"model": gpt_oss(), "train": {**EP, **HALVES}, "on": ON_4},
    "packed-more-tokens": {"model": gpt_oss(num_key_value_heads=4), "train": {**EP, **QUARTERS}, "on": ON_4},
    "packed-frozen": {
        "model": gpt_oss(), "train": {**EP, "frozen": ["*.embed_tokens.*", "*.layers.0.*"]}, "on": ON_4
    },
    "packed-frozen-experts": {"model": gpt_oss(), "train": {**EP, "frozen": ["*.experts.*"]}, "on": ON_4},
    "packed-lora": {"model": {**gpt_oss(), "adapter": ADAPTER}, "train": EP, "on": ON_4},
    "packed-gathered": {
        "model": gpt_oss(), "train": {**EP, "fsdp": {"reshard_after_forward": False}, "global_batch": 8}, "on": ON_4
    },
    "packed-unsharded": {
        "model": gpt_oss(), "train": {**EP, "fsdp": {"accumulate": "unsharded"}, "global_batch": 8}, "on": ON_4
    },
    "packed-qwen3_moe": {"model": QWEN3_MOE, "train": EP, "on": ON_4 * IS_5},
    # Experts that all tokens share.
    "packed-deepseek_v3": {"model": of_type("deepseek_v3", **DEEPSEEK, **NO_LOSS), "train": EP, "on": ON_4 * IS_5},
    "packed-glm4_moe": {"model": of_type("glm4_moe", **GLM, **NO_LOSS), "train": EP, "on": ON_4 * IS_5},
}  # fmt: skip

# Packs whose tokens lie on several ranks.
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}  # in the second layer
QWEN3 = {"config": {"model_type": "qwen3", "head_dim": 16, **WINDOW, **SIZES}, "seed": 2}
HEADS = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}  # 4 divides the one, and not the other
SIX = {"config": {"model_type": "llama", **SIZES, **HEADS}}
OF_TOKENS: Cases = {
    "shared-tied": {
        "model": TIED, "train": {**HALVES, "per_device_batch": 2, "pad_to": 301}, "on": rounds([2], [2, 4])
    },
    "shared-repeated": {"model": LLAMA, "train": QUARTERS, "on": [4]},
    "shared-llama": {"model": LLAMA, "train": HALVES, "on": rounds([], [2, 4])},
    "shared-window": {"model": QWEN3, "train": HALVES, "on": rounds([], [2, 4])},
    "shared-window-of-quarters": {"model": QWEN3, "train": QUARTERS, "on": ON_4},
    "shared-six": {"model": SIX, "train": QUARTERS, "on": ON_4},
    "shared-copies": {"model": TIED, "train": {**HALVES, "shard_ranks": 2}, "on": ON_4},
    "shared-again": {"model": TIED, "train": {**HALVES, "gradient_checkpointing": True}, "on": ON_2},
    "shared-compiled": {
        "model": TIED, "train": {**HALVES, "torch_compile": True}, "on": ON_2 * (which("g++") is not None)
    },
    "shared-matrices": {"model": LLAMA, "train": {**HALVES, **TP}, "on": ON_4},
    "shared-lora": {"model": TIED_LORA, "train": HALVES, "on": ON_2},
}  # fmt: skip
CASES: Cases = OF_EXPERTS | OF_MATRICES | OF_RANKS_EXPERTS | OF_TOKENS

# Compared with each other: their losses are none of plain transformers'.
PAIRS: Cases = {
    "pair-experts": {"model": QWEN, "train": QUARTERS, "on": ON_4},
    "pair-experts-alone": {"model": QWEN, "on": ON_2},
    "pair-z": {"model": LLAMA, "train": {**HALVES, "z_loss": 0.1}, "on": ON_2},
    "pair-z-alone": {"model": LLAMA, "train": {"z_loss": 0.1}, "on": ON_2},
    "pair-mixed": {"model": gpt_oss(), "train": {**EP, "bf16": True}, "on": ON_4},
    "pair-mixed-whole": {"model": gpt_oss(), "train": {"bf16": True}, "on": ON_4},
}

NO_TENSOR_PARALLEL = "set train.tensor_parallel to 1"
NO_PLAN = (
    "transformers has no plan for expert parallelism of {} (its models with a plan are gpt-oss, Llama 4 and, from 5.0 "
    "on, most mixtures of experts): set train.expert_parallel to 1. Experts are then sharded over ranks like other "
    "weights"
)
NOT_HERE = "transformers' plan for {} cuts {} by '{}', which is not here: " + NO_TENSOR_PARALLEL + "…"
AT = "model.layers.*" if IS_5 else "layers.*"
REFUSED: Cases = {
    "heads": {
        "model": LLAMA, "train": {"tensor_parallel": 4}, "on": [4],
        "error": "train.tensor_parallel 4 does not divide num_key_value_heads 2 of LlamaForCausalLM: choose a divisor "
        "of 2…",
    },
    "dora": {
        "model": DORA, "train": TP, "on": [2],
        "error": "train.tensor_parallel cuts adapters of peft_type LORA without use_dora alone, and this one is LORA: "
        "set it to 1…",
    },
    "opt": {
        "model": OPT, "train": TP, "on": [2],
        "error": f"transformers has no plan for tensor parallelism of OPTForCausalLM: {NO_TENSOR_PARALLEL}…",
    },
    "compiled": {
        "model": LLAMA, "train": {**TP, "torch_compile": True}, "on": [2],
        "error": "train.tensor_parallel 2 and torch_compile cannot be combined yet…",
    },
    "channels": {
        "model": of_type("llama", intermediate_size=63), "train": TP, "on": [2],
        "error": "train.tensor_parallel 2 does not divide the 63 outputs of model.layers.0.mlp.gate_proj: choose a "
        "divisor of 63…",
    },
    "dense": {"model": TIED, "train": EP, "on": [2], "error": NO_PLAN.format("Qwen2ForCausalLM")},
    "divisor": {
        "model": gpt_oss(num_local_experts=6), "train": AT_ALL_RANKS, "on": [4],
        "error": "train.expert_parallel 4 does not divide the 6 experts of GptOssForCausalLM: choose a divisor",
    },
    "adapter": {
        "model": {**gpt_oss(), "adapter": ADAPTER_OF_EXPERTS}, "train": EP, "on": [2],
        "error": "GptOssForCausalLM lacks the parameters of its experts in transformers' plan (such as "
        f"{AT}.mlp.experts.gate_up_proj; an adapter of experts has other parameters): set train.expert_parallel to 1",
    },
    "rows": {
        "model": gpt_oss(num_local_experts=2, hidden_size=36, intermediate_size=9), "train": EP, "on": [4],
        "error": "2 ranks share the same 1 experts by train.expert_parallel, and divide neither these nor the 9 rows "
        "of down_proj: choose another degree, or other train.shard_ranks",
    },
    "masked": {
        "model": {**LLAMA, "attention": "sdpa"}, "train": HALVES, "on": [2],
        "error": "train.sequence_parallel 2 with attention sdpa, whose mask would cover only a single rank's tokens: "
        "set model.attention to flash_attention_2 or sdpa_varlen, or to auto…",
    },
    "state": {
        "model": HYBRID, "train": HALVES, "on": [2],
        "error": "Lfm2ForCausalLM with attention sdpa_varlen does not keep the samples of a pack apart: what one holds "
        "changes what is predicted in another: set train.sequence_parallel to 1",
    },
}  # fmt: skip
if IS_5:
    REFUSED["three-experts"] = {
        "model": of_type("mixtral", num_local_experts=3), "train": TP, "on": [2],
        "error": "train.tensor_parallel 2 does not divide the 3 experts of model.layers.0.mlp.experts: …",
    }  # fmt: skip
    REFUSED["llama4"] = {
        "model": of_type("llama4_text", num_local_experts=2, interleave_moe_layer_step=1), "train": TP, "on": [2],
        "error": NOT_HERE.format(
            "Llama4ForCausalLM", "model.layers.0.feed_forward.experts (Llama4TextExperts)", "moe_tp_experts"
        ),
    }  # fmt: skip
else:
    REFUSED["qwen2_moe"] = {
        "model": QWEN2_MOE, "train": TP, "on": [2],
        "error": "Qwen2MoeForCausalLM with attention …train.tensor_parallel 2 cuts its heads, which some models' code "
        "does not support:…",
    }  # fmt: skip
    REFUSED["deepseek_v3"] = {
        "model": of_type("deepseek_v3"), "train": TP, "on": [2],
        "error": NOT_HERE.format("DeepseekV3ForCausalLM", "model.layers.0.mlp (DeepseekV3MLP)", "gather"),
    }  # fmt: skip
    REFUSED["mixtral"] = {
        "model": MIXTRAL, "train": EP, "on": [2],
        "error": NO_PLAN.format("MixtralForCausalLM") + ", and train.tensor_parallel cuts them",
    }  # fmt: skip
