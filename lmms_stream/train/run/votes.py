"""Values of a step that all ranks agree on: votes to stop or save, and the unit sums that divide losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...types import World
from .distributed import gather


class Votes(NamedTuple):
    """Votes of a rank, or numbers of ranks: a stop signal was received, a save failed, a checkpoint is due."""

    stop: float
    failed_save: float
    save_due: float


class Agreed(NamedTuple):
    """units: sums over ranks with different packs. counts: float64[world_size, n], of each rank."""

    votes: Votes
    units: list[float]
    counts: NDArray[np.float64]


def agree(votes: Votes, units: Sequence[float], counts: Sequence[float], *, world: World) -> Agreed:
    """Exchange the values of this rank's step with all ranks, in one collective; all ranks call it."""
    everyone = gather([*votes, *units, *counts], world.world_size).numpy()
    return agreed(everyone, num_units=len(units), replication=world.replication)


def agreed(everyone: NDArray[np.float64], *, num_units: int, replication: int) -> Agreed:
    """Sum `everyone`, float64[world_size, votes + units + counts], over ranks.

    Every rank votes. `replication` consecutive ranks read the same packs; their units count once.
    """
    first = len(Votes._fields)
    return Agreed(
        votes=Votes(*everyone[:, :first].sum(axis=0).tolist()),
        units=everyone[::replication, first : first + num_units].sum(axis=0).tolist(),
        counts=everyone[:, first + num_units :],
    )


# Values that the host reads from the device in a step, in one transfer: the only wait for the device.


def read(grad_norm: torch.Tensor, losses: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The norm, and the losses on the CPU: float64 of their shape."""
    norm, *values = torch.cat([each.detach().double().flatten() for each in (grad_norm, losses)]).tolist()
    return norm, torch.tensor(values, dtype=torch.float64).view(losses.shape)
