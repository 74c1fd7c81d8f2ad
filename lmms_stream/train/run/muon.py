"""Muon for matrices that are sharded, and AdamW for the other parameters, as one optimizer.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) updates a matrix by its momentum made orthogonal.
What is orthogonal in a shard is not so in the matrix, and torch's own, given shards, sums the products of the iteration
over ranks in bfloat16: after three steps two ranks are 10 % from one. Here momentum is sharded, matrices are gathered,
and each rank computes for some of them what torch's computes for a whole one, and gives it to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import ConfigError

Scale = Literal["original", "match_rms_adamw", "spectral_unclamped"]
_QUINTIC = (3.4445, -4.7750, 2.0315)  # coefficients of the iteration, from the paper
_EPSILON = 1e-7


def hidden_matrices(model: torch.nn.Module) -> set[int]:
    """The ids of a model's matrices, without embeddings and the head."""
    outside = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if head := getattr(model, "get_output_embeddings", lambda: None)():
        outside.add(id(head.weight))
    return {id(each) for each in model.parameters() if each.ndim == 2} - outside


class Muon(torch.optim.Optimizer):
    """Groups with `is_muon` hold matrices that Muon updates, the others are AdamW's.

    momentum, nesterov, ns_steps: see torch.optim.Muon. adjust_lr_fn: how the learning rate follows the shape of a
    matrix; by default so that its updates are as large as AdamW's, and both have one learning rate.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Scale = "match_rms_adamw",
    ):
        if adjust_lr_fn not in ("original", "match_rms_adamw", "spectral_unclamped"):
            raise ConfigError(
                f"adjust_lr_fn of muon is original, match_rms_adamw or spectral_unclamped, got {adjust_lr_fn!r}"
            )
        of_muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, **of_muon})
        others = [group for group in self.param_groups if not group["is_muon"]]
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["is_muon"]:
                self._update([each for each in group["params"] if each.grad is not None], group)
        if self._adamw is not None:
            # Both are others after load_state_dict.
            self._adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update matrices as torch.optim.Muon does, as many at once as ranks share them."""
        size = max(map(_num_sharing, parameters), default=1)
        for start in range(0, len(parameters), size):
            together = parameters[start : start + size]
            updates = orthogonal_each([self._averaged(each, group) for each in together], steps=group["ns_steps"])
            for parameter, update in zip(together, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * _scale(group["adjust_lr_fn"], *parameter.shape))

    def _averaged(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """The momentum of a matrix after this step's gradient."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average: torch.Tensor = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average


def orthogonal_each(matrices: Sequence[torch.Tensor], *, steps: int) -> list[torch.Tensor]:
    """Each made orthogonal, and sharded as it was: bfloat16.

    Of the ranks that share them the first computes the first, the next the next, and so on.
    """
    found: list[torch.Tensor] = []
    for number, matrix in enumerate(matrices):
        if not isinstance(matrix, DTensor):
            found.append(orthogonal(matrix, steps=steps))
            continue
        whole = matrix.full_tensor()
        is_mine = _owner(matrix, number) == matrix.device_mesh.get_local_rank(_shard_dim(matrix))
        found.append(
            orthogonal(whole, steps=steps).contiguous() if is_mine else torch.empty_like(whole, dtype=torch.bfloat16)
        )
    for number, (matrix, whole) in enumerate(zip(matrices, found, strict=True)):
        if isinstance(matrix, DTensor):
            group = matrix.device_mesh.get_group(_shard_dim(matrix))
            dist.broadcast(whole, group=group, group_src=_owner(matrix, number))
            found[number] = distribute_tensor(whole, matrix.device_mesh, matrix.placements, src_data_rank=None)
    return found


def _shard_dim(matrix: DTensor) -> int:
    """The dimension of its mesh along which ranks have parts of it."""
    return next((dim for dim, placement in enumerate(matrix.placements) if placement.is_shard()), 0)


def _num_sharing(matrix: torch.Tensor) -> int:
    return matrix.device_mesh.size(_shard_dim(matrix)) if isinstance(matrix, DTensor) else 1


def _owner(matrix: DTensor, number: int) -> int:
    return number % _num_sharing(matrix)


def orthogonal(matrix: torch.Tensor, *, steps: int) -> torch.Tensor:
    """The nearest matrix whose singular values are about 1, by Newton-Schulz iterations: bfloat16."""
    a, b, c = _QUINTIC
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(torch.bfloat16, copy=True)
    found = found.T if is_tall else found
    found.div_(found.norm().clamp(min=_EPSILON))
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def _scale(kind: Scale, rows: int, columns: int) -> float:
    if kind == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else math.sqrt(rows / columns)
