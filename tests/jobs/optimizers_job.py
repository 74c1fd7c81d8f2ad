"""A job: each optimizer over a sharded model, with the gradients of the steps given.

Its argument is a folder with job.pt: {"model": …, "gradients": [[…]], "settings": {name: …}}. Beside it comes
`found.pt`: by name, the parameters after the steps; and `orthogonal.pt`: the shapes of matrices that each rank has made
orthogonal together, and the collectives of a step of Muon on rank 0.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lmms_stream.train.run import optimizers
from lmms_stream.train.run.distributed import init_distributed
from lmms_stream.train.run.optimizers import build_optimizer
from lmms_stream.train.run.settings import TrainConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.train.step_costs import collectives


class StackedExperts(torch.nn.Module):
    """Experts in a single parameter, with their biases."""

    def __init__(self, num_experts: int):
        super().__init__()
        self.of_experts = torch.nn.Parameter(torch.randn(num_experts, 6, 10))
        self.of_experts_bias = torch.nn.Parameter(torch.randn(num_experts, 6))


def main() -> None:
    folder = Path(sys.argv[1])
    job = torch.load(folder / "job.pt", weights_only=False)
    init_distributed(60.0)
    found = {}
    counted_of: dict[str, dict[str, int]] = {}
    shapes: list[tuple[int, ...]] = []
    made_by = optimizers.orthogonal

    def counted(matrices: torch.Tensor, *, steps: int) -> torch.Tensor:
        shapes.append(tuple(matrices.shape))
        return made_by(matrices, steps=steps)

    optimizers.orthogonal = counted
    for name, settings in job["settings"].items():
        model = copy.deepcopy(job["model"])
        fully_shard(model)
        optimizer = build_optimizer(model, TrainConfig(output_dir="out", global_batch=1, max_steps=1, **settings))
        for gradients in job["gradients"]:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert isinstance(parameter, DTensor)
                parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            with collectives() as counts:
                optimizer.step()
            counted_of[name] = dict(counts)
        found[name] = [each.full_tensor().detach() for each in model.parameters() if isinstance(each, DTensor)]
    of_ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, shapes)
    if dist.get_rank() == 0:
        torch.save((of_ranks, counted_of), folder / "orthogonal.pt")
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
