"""The reference of a run's task: its starting weights, or what they gave to the answers of its datasets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import ConfigError, LmmsStreamError
from ..loader.collate import join
from ..mds.core import core_of, opens_loader
from ..processors.base import processor_fingerprint
from ..types import Batch
from .data import check_evaluated, eval_source
from .model.model import PackedModel
from .protocol import Trainer
from .reference.frozen import FrozenWeights
from .reference.reference import Reference
from .reference.stored import StoredLogProbs, StoredReference, folder_of
from .run.distributed import cpu_group, gather
from .run.settings import Packed
from .tasks.passes import StepPasses

STEPS_AT_ONCE = 16  # packs of each rank that are measured before what they gave is kept
logger = logging.getLogger("lmms_stream")


def reference_of(trainer: Trainer, model: PackedModel) -> Reference | None:
    """None for a task that compares with none. All ranks call it, before the weights change.

    With a stored reference, what is not yet measured of the run's datasets is measured here.
    """
    kind = getattr(trainer.task, "reference", None)
    if kind is None:
        return None
    frozen = FrozenWeights(model, keeps=kind == "model")
    if kind == "model":
        return frozen
    datasets = {name: (name, each) for name, each in _training_datasets(trainer).items()}
    for name, each in trainer.data.evaluations.items():
        datasets[eval_source(name)] = (name, each)
    values = {source: _stored(trainer, frozen, each, name) for source, (name, each) in datasets.items()}
    return StoredReference(values, digest=frozen.digest)


def _training_datasets(trainer: Trainer) -> dict[str, Packed]:
    """The datasets that are trained on, by the names of their sources."""
    dataset: Any = trainer.data.train_dataset
    return dict(dataset) if isinstance(dataset, Mapping) else {trainer.loader.sources[0]: dataset}


def _stored(trainer: Trainer, frozen: FrozenWeights, dataset: Packed, name: str) -> NDArray[np.float32]:
    """The log-probabilities of a dataset's samples, which rank 0 reads or keeps; all ranks have them at the end."""
    if opens_loader(dataset):
        raise ConfigError(
            "a stored reference is of samples by their numbers, and this dataset has none: set the task's reference to "
            "model, or give a PackedStreamingDataset"
        )
    core: Any = core_of(dataset)  # type: ignore[arg-type]
    files = StoredLogProbs(
        folder=folder_of(core.storage, output_dir=Path(trainer.config.output_dir)),
        described={
            "weights": frozen.digest,
            "processor": processor_fingerprint(core.processor),
            "lengths": core.length_index().content_hash,
            "bf16": bool(trainer.config.bf16),
        },
        shape=(core.num_samples, trainer.task.num_answers),  # type: ignore[attr-defined]  # a PreferenceTask has it
    )
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            whole = files.read()
            told = [whole, files.begin() if whole is None else None]
        except (LmmsStreamError, OSError) as error:
            told = [error, None]
    dist.broadcast_object_list(told, src=0, group=cpu_group())
    whole, known = told
    if isinstance(whole, Exception):
        raise whole
    if whole is None:
        loader = trainer.data.eval_loader(name, dataset)
        check_evaluated(loader)
        whole = _measured(trainer, frozen, files, known=known, packs=loader)
    values: NDArray[np.float32] = whole
    return values


def _measured(
    trainer: Trainer,
    frozen: FrozenWeights,
    files: StoredLogProbs,
    *,
    known: NDArray[np.float32],
    packs: Iterable[Batch],
) -> NDArray[np.float32]:
    """Run the model on packs of a dataset, of which each rank has as many, but for those that are known.

    What they gave is kept every STEPS_AT_ONCE steps, where a run that is killed goes on.
    """
    is_first, world_size = trainer.world.rank == 0, trainer.world.world_size
    if is_first:
        count = int(np.isnan(known).any(axis=1).sum())
        logger.info("measuring %s samples by the reference's weights, kept at %s", f"{count:,}", files.path)
    mine: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []

    def keep() -> None:
        found: list[Any] = [None] * world_size
        dist.gather_object(mine, found if is_first else None, group=cpu_group())
        for of_rank in found[:: trainer.world.replication] if is_first else ():
            for sample_ids, values in of_rank:
                files.add(sample_ids, values)
        mine.clear()

    for step, pack in enumerate(packs, start=1):
        sample_ids = pack.sample_ids.numpy()
        is_new = bool(np.isnan(known[sample_ids]).any())
        if gather([float(is_new)], world_size).any():
            trainer.model.check_tokens(pack)
            (values,) = frozen.log_probs(StepPasses([[pack]], joined=join, device=trainer.device)).values()
            mine.append((sample_ids, values.float().cpu().numpy().reshape(len(sample_ids), known.shape[1])))
        if step % STEPS_AT_ONCE == 0:
            keep()
    keep()
    told: list[Any] = [files.end() if is_first else None]
    dist.broadcast_object_list(told, src=0, group=cpu_group())
    whole: NDArray[np.float32] = told[0]
    return whole
