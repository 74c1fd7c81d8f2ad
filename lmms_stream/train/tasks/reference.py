"""The starting weights of a run, for tasks that compare the model with them: digest, copy, or stored results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError, ConfigError
from ...processors.base import IGNORED_LABEL
from ...storage.failures import disk_errors
from ...storage.local import LocalStorage
from ...storage.locks import locked, temporary_name
from ...storage.storage import Storage
from ...types import Batch
from ..model.adapters import adapter_of, add_tensor, without_adapter
from ..model.choice import evaluating
from ..model.model import PackedModel
from ..model.sharding import reshard
from ..run.copies import writes_saved
from ..run.distributed import from_rank_0
from ..run.optimizers import local

# Log-probabilities of answers: of each sequence of a batch, summed over tokens trained on.

OfPacks = Mapping[int, torch.Tensor]  # micro_batch of a pack -> float32[sequences of the pack]


class Passes(Protocol):
    """Forward passes. packs: by pass, on the CPU. Iteration yields the joined batch on the device, and the packs."""

    @property
    def packs(self) -> Sequence[Sequence[Batch]]: ...

    def __iter__(self) -> Iterator[tuple[Batch, Sequence[Batch]]]: ...


def num_learnt(pack: Batch) -> list[int]:
    """Return the number of tokens trained on in each sequence of a pack on the CPU, without padding."""
    if pack.sequences is None:
        return []
    ends = np.concatenate([[0], np.cumsum(pack.labels[0].numpy() != IGNORED_LABEL)])
    bounds = pack.sequences.numpy()
    counts: list[int] = (ends[bounds[:, 2]] - ends[bounds[:, 1]]).tolist()
    return counts


def log_probs_of(token_losses: torch.Tensor, packs: Sequence[Batch]) -> torch.Tensor:
    """Return float32[sequences], differentiable, from the losses of the tokens trained on, in the order of packs.

    All tokens trained on are in sequences. A result without sequences is differentiable, too.
    """
    counts = [count for pack in packs for count in num_learnt(pack)]
    if not counts:
        return -token_losses
    return -torch.stack([each.sum() for each in token_losses.split(counts)])


def measured_log_probs(model: PackedModel, passes: Passes) -> dict[int, torch.Tensor]:
    """Return the log-probabilities of each pack's sequences, in evaluation mode: no gradients, no dropout.

    All ranks call this with equally many passes.
    """
    found: dict[int, torch.Tensor] = {}
    with evaluating(model), torch.no_grad():
        for batch, packs in passes:
            of_sequences = log_probs_of(model(batch, packs).tokens, packs)
            counts = [0 if pack.sequences is None else len(pack.sequences) for pack in packs]
            found |= zip((pack.micro_batch for pack in packs), of_sequences.split(counts), strict=True)
    return found


ReferenceKind = Literal["model", "stored"]


class Reference(Protocol):
    """The starting weights of a run, for comparison with the model. All ranks make the same calls.

    digest: of the starting weights.
    """

    @property
    def digest(self) -> str: ...

    def log_probs(self, passes: Passes) -> OfPacks:
        """Return the log-probabilities of each pack's sequences, on any device."""
        ...


def weights_digest(model: PackedModel, *, vote: Callable[[], None] = lambda: None) -> str:
    """Return the xxh3 of a sharded model's weights (names, types, shapes, numbers), equal for any number of ranks.

    For a model with an adapter, the digest of the base weights: they are the reference. All ranks call this; weights
    are gathered one after another, with a vote after each.
    """
    if (adapter := adapter_of(model.model)) is not None:
        return adapter.base
    digest = xxhash.xxh3_64()
    for name, parameter in model.model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            add_tensor(digest, name, whole)
        vote()
    return from_rank_0(digest.hexdigest())


def check_adapter(model: PackedModel) -> None:
    """Raise ConfigError for an adapter with an effect at the beginning: the base would not be the reference."""
    adapter = adapter_of(model.model)
    begins = True if adapter is None else adapter.config.get("init_lora_weights", True)
    if begins not in (True, "gaussian"):
        raise ConfigError(
            f"the adapter's init_lora_weights {begins!r} changes the base weights or their outputs, which are the "
            "reference: leave it out"
        )


# Log-probabilities of a dataset's samples under the starting weights, measured once and kept in a file.
#
# The file is stored next to the dataset, in `_lmms/reference/`: `<fingerprint>.npy`, float32[num_samples, k], for the k
# sequences of each sample in order. `<fingerprint>.json` describes weights and data of the measurement, and is
# written last. Before, `<fingerprint>.part.npy` has the measured values, and NaN for other samples.


REFERENCE_FOLDER = "_lmms/reference"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredLogProbs:
    """The files of a dataset's log-probabilities in a folder.

    described: everything with influence on the values, as JSON values. shape: samples, sequences per sample.
    """

    folder: Path
    described: Mapping[str, Any]
    shape: tuple[int, int]

    @property
    def fingerprint(self) -> str:
        """Hash of the description."""
        return hashlib.blake2b(json.dumps(self.described, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def path(self) -> Path:
        """Path of the array."""
        return self.folder / f"{self.fingerprint}.npy"

    @property
    def _part(self) -> Path:
        return self.path.with_suffix(".part.npy")

    @property
    def _description(self) -> Path:
        return self.path.with_suffix(".json")

    def read(self) -> NDArray[np.float32] | None:
        """Return the log-probabilities; None if not all are measured. Raises CheckpointError for damaged files."""
        try:
            found = json.loads(self._description.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._damaged(self._description, str(error)) from error
        if not isinstance(found, dict) or found.get("described") != self.described:
            raise self._damaged(self._description, "it describes others")
        values = self._array(self.path)
        if _hash(values) != found.get("content_hash"):
            raise self._damaged(self.path, "its values are not those that were written")
        return values

    @contextmanager
    def owned(self, elsewhere: Path) -> Iterator[StoredLogProbs]:
        """Own the files while they are measured. Yield them, or files of this run if another process measures these.

        elsewhere: a folder of this run. Several runs share a dataset, and each would rename the others' files.
        """
        with disk_errors(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            try:
                is_ours = held.enter_context(locked(self.path.with_suffix(".lock"), timeout_s=0)) is not None
            except OSError:  # a file system without locks
                is_ours = True
            yield self if is_ours else replace(self, folder=elsewhere)

    def begin(self) -> NDArray[np.float32]:
        """Return the values measured so far, NaN elsewhere; create the file if missing."""
        if self._part.exists():
            return self._array(self._part)
        with disk_errors(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(self._part)
            with temporary.open("wb") as file:
                np.save(file, np.full(self.shape, np.nan, np.float32))
            temporary.replace(self._part)
        return self._array(self._part)

    def add(self, sample_ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Write the values of some samples to the file: they outlive the process. Call `begin` first."""
        with disk_errors(str(self._part)):
            mapped = np.load(self._part, mmap_mode="r+", allow_pickle=False)
            mapped[sample_ids] = values
            mapped.flush()

    def end(self) -> NDArray[np.float32]:
        """Mark the measurement as complete, and return all values."""
        values = self._array(self._part)
        said = {"described": self.described, "content_hash": _hash(values)}
        with disk_errors(str(self.folder)):
            self._part.replace(self.path)
            temporary = temporary_name(self._description)
            temporary.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
            temporary.replace(self._description)
        return values

    def _array(self, path: Path) -> NDArray[np.float32]:
        try:
            values: NDArray[Any] = np.load(path, allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise self._damaged(path, str(error)) from error
        if values.dtype != np.float32 or values.shape != self.shape:
            raise self._damaged(path, f"it has {values.dtype}{list(values.shape)}, not float32{list(self.shape)}")
        return values

    def _damaged(self, path: Path, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the log-probabilities of the reference at {path} cannot be used ({reason}): remove the files "
            f"{self.fingerprint}.* there, and they are measured again"
        )


def _hash(values: NDArray[np.float32]) -> str:
    return hashlib.blake2b(values.tobytes(), digest_size=16).hexdigest()


def folder_of(storage: Storage, *, output_dir: Path) -> Path:
    """Return the folder for a dataset's log-probabilities: next to the dataset if writable, else in the output_dir.

    storage: of the dataset.
    """
    if isinstance(storage, LocalStorage) and os.access(storage.folder, os.W_OK):
        return storage.folder / REFERENCE_FOLDER
    return own_folder(output_dir)


def own_folder(output_dir: Path) -> Path:
    """Return the folder for log-probabilities of a single run."""
    return output_dir / "reference"


class StoredReference:
    """A Reference: log-probabilities of the samples of each source, float32[num_samples, k]. digest: of the weights."""

    def __init__(self, of_sources: Mapping[str, NDArray[np.float32]], *, digest: str):
        self._of_sources, self.digest = of_sources, digest

    def log_probs(self, passes: Passes) -> OfPacks:
        """See Reference; raises ConfigError for unmeasured samples."""
        return {
            pack.micro_batch: self._of_samples(pack.source, pack.sample_ids.numpy())
            for packs in passes.packs
            for pack in packs
        }

    def _of_samples(self, source: str, sample_ids: NDArray[np.int64]) -> torch.Tensor:
        if not len(sample_ids):
            return torch.empty(0)  # a pack without samples has no source
        if source not in self._of_sources:
            raise ConfigError(
                f"log-probabilities of the reference are stored of {', '.join(self._of_sources)}, not of {source}: "
                "give it to the trainer as an eval_dataset, or set the task's reference to model"
            )
        values = self._of_sources[source][sample_ids]
        if np.isnan(values).any():
            missing = int(sample_ids[np.isnan(values).any(axis=1)][0])
            raise ConfigError(
                f"sample {missing} of {source} has no log-probabilities of the reference, for no pack had it when they "
                "were measured: set the task's reference to model, or keep the settings of the packs"
            )
        return torch.from_numpy(values.reshape(-1))


# The starting weights, kept next to the trained ones.
#
# Each rank keeps a copy of its shards of the trained parameters, in the same number format. A forward pass of the
# reference exchanges copy and parameters, to run the same model with the same attention, kernels and shards. With an
# adapter nothing is kept: the reference is the model without the adapter.


class FrozenWeights:
    """A Reference: the current weights of a sharded model. All ranks create this before any update or resume.

    keeps: whether to copy trained weights. Without copy and adapter, the reference is valid only before an update.
    vote: see weights_digest.
    """

    def __init__(self, model: PackedModel, *, keeps: bool = True, vote: Callable[[], None] = lambda: None):
        check_adapter(model)
        self._model, self.digest = model, weights_digest(model, vote=vote)
        self._has_adapter = adapter_of(model.model) is not None
        trained = [each for each in model.parameters() if each.requires_grad] if keeps and not self._has_adapter else []
        parts = [local(each.detach()) for each in trained]
        self._pairs = [(each, each.clone()) for each in parts]

    def log_probs(self, passes: Passes) -> OfPacks:
        """See Reference."""
        with without_adapter(self._model.model) if self._has_adapter else self._in_place():
            return measured_log_probs(self._model, passes)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Give the model the starting weights inside."""
        reshard(self._model)  # parts still gathered after a forward pass have the trained weights
        self._swap()
        try:
            yield
        finally:
            reshard(self._model)
            self._swap()

    @writes_saved
    @torch.no_grad()
    def _swap(self) -> None:
        for trained, kept in self._pairs:
            before = trained.clone()
            trained.copy_(kept)
            kept.copy_(before)
