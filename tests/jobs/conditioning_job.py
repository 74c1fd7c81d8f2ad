"""A job: a model in bfloat16, sharded over the ranks and not sharded. Its argument is a folder for `<name>-<rank>.pt`.

Of each model: its output, and the number format and values of all that its blocks are given, of either.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lmms_stream.train.model.build import PlainModel
from lmms_stream.train.model.sharding import blocks_of, shard_model
from lmms_stream.train.run.distributed import end_distributed, init_distributed
from lmms_stream.train.run.mesh import build_meshes
from lmms_stream.train.run.settings import FsdpConfig, TrainConfig

Run = Callable[[Any], torch.Tensor]


def dit() -> tuple[torch.nn.Module, Run]:
    """A DiT of three blocks, and a forward pass at two times that bfloat16 does not have."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=3, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    images, labels = torch.randn(2, 4, 8, 8), torch.tensor([1, 7])
    times = torch.tensor([123.4, 777.7])
    return model, lambda inner: inner(images.bfloat16(), timestep=times, class_labels=labels).sample


def tower(name: str) -> tuple[torch.nn.Module, Run]:
    """A tower of Qwen2-VL or Qwen2.5-VL, and a forward pass of two images."""
    modeling: Any = import_module(f"transformers.models.{name}_vl.modeling_{name}_vl")
    grid = torch.tensor([[1, 12, 16], [1, 4, 8]])
    if name == "qwen2":
        config = modeling.Qwen2VLVisionConfig(depth=3, embed_dim=32, num_heads=2, hidden_size=32, mlp_ratio=2)
        model = modeling.Qwen2VisionTransformerPretrainedModel._from_config(config)
    else:
        config = modeling.Qwen2_5_VLVisionConfig(
            depth=3, hidden_size=32, num_heads=2, out_hidden_size=32, intermediate_size=64, fullatt_block_indexes=[1]
        )
        model = modeling.Qwen2_5_VisionTransformerPretrainedModel._from_config(config)
    pixels = torch.randn(int(grid.prod(dim=1).sum()), 3 * 2 * 14 * 14)

    def run(inner: Any) -> torch.Tensor:
        made = inner(pixels, grid)
        found: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
        return found

    return model, run


def llama() -> tuple[torch.nn.Module, Run]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids = torch.arange(40)[None]
    return model, lambda inner: inner(input_ids=ids, use_cache=False).logits


def deepseek() -> tuple[torch.nn.Module, Run]:
    """A model whose class keeps its routers in float32."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids = torch.arange(40)[None]
    return model, lambda inner: inner(input_ids=ids, use_cache=False).logits


def wan() -> tuple[torch.nn.Module, Run]:
    """A model of diffusers whose class keeps norms and embeddings of times in float32."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=3, rope_max_seq_len=32,
    )  # fmt: skip
    videos, texts, times = torch.randn(2, 4, 1, 8, 8), torch.randn(2, 5, 16), torch.tensor([123.4, 777.7])
    return model, lambda inner: inner(videos.bfloat16(), times, texts.bfloat16()).sample


def in_bfloat16(model: Any, folder: str) -> torch.nn.Module:
    """The model as from_pretrained has it in bfloat16; a tower, which cannot be saved alone, all in bfloat16."""
    if not any(getattr(model, name, None) for name in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")):
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        return model  # type: ignore[no-any-return]
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    loaded: torch.nn.Module = type(model).from_pretrained(folder, torch_dtype=torch.bfloat16)
    return loaded.eval()


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Run]]] = {
    "dit": dit,
    "qwen2": partial(tower, "qwen2"),
    "qwen2_5": partial(tower, "qwen2_5"),
    "llama": llama,
    "deepseek": deepseek,
    "wan": wan,
}


def read_inputs(blocks: Sequence[torch.nn.Module], seen: list[Any]) -> None:
    """Keep copies of all tensors that the blocks are given as they run, by the block's number."""

    def keep(_: Any, args: Any, kwargs: Any, *, number: int) -> None:
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        seen.append([number, *(each.detach().clone() for each in flat if isinstance(each, torch.Tensor))])

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(partial(keep, number=number), with_kwargs=True)


def main() -> None:
    world, device = init_distributed(60)
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, run = make()
        model.eval()  # no label is dropped at random
        plain = PlainModel(in_bfloat16(model, f"{sys.argv[1]}/{name}"))
        sharded = PlainModel(model)
        wrap = ["BasicTransformerBlock"] if name == "dit" else []
        config = TrainConfig(output_dir=sys.argv[1], global_batch=2, max_steps=1, bf16=True, fsdp=FsdpConfig(wrap=wrap))
        blocks = {"plain": blocks_of(plain, wrap), "sharded": blocks_of(sharded, wrap)}
        meshes = build_meshes(device, world_size=world.world_size, config=config)
        shard_model(sharded, meshes, config=config, device=device)
        found = {}
        for kind, each in (("plain", plain), ("sharded", sharded)):
            seen: list[Any] = []
            read_inputs(blocks[kind], seen)
            output = each(run)
            output.float().square().sum().backward()
            found[kind] = {"output": output.detach(), "inputs": seen}
        torch.save(found, Path(sys.argv[1], f"{name}-{world.rank}.pt"))
    end_distributed()


if __name__ == "__main__":
    main()
