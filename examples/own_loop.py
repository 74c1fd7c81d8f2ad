"""Train with FSDP2 in a loop of your own, and resume on any number of ranks.

torchrun --nproc-per-node 2 examples/own_loop.py DATASET TOKENIZER MODEL OUTPUT STEPS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lmms_stream import ChatProcessor, PackedLoader, PackedStreamingDataset, PackingConfig
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

remote, tokenizer, pretrained, output, num_steps = sys.argv[1:]
dist.init_process_group()
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
model = AutoModelForCausalLM.from_pretrained(pretrained).to(device).train()
for block in model.model.layers:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
packing = PackingConfig(packing_length=1024, overlong="drop")
dataset = PackedStreamingDataset(remote, processor=ChatProcessor.from_pretrained(tokenizer), packing=packing)
loader = PackedLoader(dataset, global_batch=4, num_workers=1)


def state() -> dict:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "data": loader.stateful()}


if saved := sorted(Path(output).glob("step-*/.metadata")):  # written last, so its checkpoint is whole
    loaded = state()
    dcp.load(loaded, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
for step in loader.steps(until=int(num_steps)):
    total = torch.zeros((), device=device)
    for batch in step.batches:
        arguments = batch.to(device).for_model(model, labels=True)
        loss = model(**arguments, num_items_in_batch=step.num_loss_tokens).loss
        (loss * dist.get_world_size()).backward()  # FSDP2 averages gradients over ranks
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        sys.stdout.write(f"step {loader.step} of {num_steps}: loss {total.item():.4f}\n")
    dcp.save(state(), checkpoint_id=Path(output, f"step-{loader.step:06d}"))
dist.destroy_process_group()
