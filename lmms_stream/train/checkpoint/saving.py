"""Save, resume and export a run: model, optimizer, state and fingerprint."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError

from ...config import section_of, with_new_keys
from ...errors import CheckpointError, StorageError, TrainingError
from ...mds.core import processor_of
from ...storage.local import LocalStorage
from ...storage.locks import locked
from ...storage.owner import BEAT_S, Owner
from ...storage.retry import Retry
from ...storage.storage import Storage, open_storage
from ...version import VERSION
from ...versions.transformers import HAS_FORMER_CONFIGS
from ..model.adapters import adapter_of
from ..model.build import config_of
from ..run.distributed import from_rank_0
from ..run.optimizers import Average
from ..run.settings import Datasets, TrainConfig
from .checkpoint import Checkpointer
from .export import check_out, export_checkpoint, is_own_code, model_files, save_folder
from .resume import Resumable
from .store import MODEL_FOLDER, Checkpoint, checkpoints_url, folder_name, link_checkpoints
from .tensors import NOTHING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


STAGING_NAME = "checkpoints-on-their-way"
LOCK_NAME = ".run.lock"
OTHER_RUN_S = 20.0  # to wait for another run: loader workers of a killed run end after some seconds
OWNER_TIMEOUT_S = 60.0  # of a request about the owner of a store
EXPORT_NAME, EXPORT_AVERAGE_NAME = "export", "export-ema"
logger = logging.getLogger("lmms_stream")


class RunOwner:
    """Context in which no other run can have the output_dir or the folder of checkpoints; all ranks enter it.

    A run changes these folders only inside. Raises TrainingError if another run has one of them.
    """

    def __init__(self, args: TrainConfig):
        checkpoints = checkpoints_url(args.output_dir, args.checkpoint_dir)
        self._folders = {"output_dir": args.output_dir, "checkpoint_dir": checkpoints}  # by setting
        self._owned = ExitStack()  # locks of the folders, on rank 0
        self.check: Callable[[], None] = lambda: None  # see Owner.check

    def __enter__(self) -> RunOwner:
        holder = from_rank_0(self._own_folders() if dist.get_rank() == 0 else None)
        if holder is not None:
            raise TrainingError(holder)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._owned.close()

    def _own_folders(self) -> str | None:
        """Lock the folders of this run; return the reason if another run has a folder."""
        self._locked: list[Path] = []
        for setting, folder in self._folders.items():
            storage = open_storage(folder, retry=Retry(timeout_s=OWNER_TIMEOUT_S))
            try:
                holder = self._lock(storage.folder) if isinstance(storage, LocalStorage) else self._own(storage)
            except (OSError, StorageError) as error:  # a file system without locks, a store without times
                logger.warning("whether another run writes to %s is not known: %s", folder, error)
                continue
            if holder is not None:
                self._owned.close()
                return (
                    f"another run writes to {folder}: {holder}. Wait for its end, or give this run another "
                    f"train.{setting}"
                )
        return None

    def _lock(self, folder: Path) -> str | None:
        """Lock a folder, once; return the holder of the lock, if any."""
        path = folder.resolve() / LOCK_NAME
        if path in self._locked:  # checkpoint_dir is the output_dir
            return None
        folder.mkdir(parents=True, exist_ok=True)
        self._locked.append(path)
        return None if self._owned.enter_context(locked(path, timeout_s=OTHER_RUN_S)) else f"it holds {path}"

    def _own(self, storage: Storage) -> str | None:
        """Own a prefix of a store; return the owner, if any."""
        self.check = lambda: None
        owner = Owner(storage, beat_s=BEAT_S)
        holder = owner.take()
        if holder is None:
            self._owned.callback(owner.release)
            self.check = owner.check
        return holder


class RunSaver:
    """Checkpoints of a run, and the final export. A context inside the owner's: the exit waits for the save in flight.

    model: the transformers model without wrappers: parameters are saved under the names in this model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        args: TrainConfig,
        *,
        datasets: Datasets,
        average: Average | None = None,
        owner: RunOwner,
    ):
        self._model, self._optimizer, self._args = model, optimizer, args
        output_dir = Path(args.output_dir)
        self._export, self._export_average = output_dir / EXPORT_NAME, output_dir / EXPORT_AVERAGE_NAME
        self._checkpointer = Checkpointer(
            checkpoints_url(args.output_dir, args.checkpoint_dir),
            staging=output_dir / STAGING_NAME,
            keep=args.save_total_limit,
            asynchronous=args.async_save,
            timeout_s=args.timeout_s,
            average=average,
        )
        self._checkpointer.check_owner = lambda: owner.check()
        self.url = self._checkpointer.url
        self.steps, self.probe = self._checkpointer.steps, self._checkpointer.probe
        self.wait, self.find = self._checkpointer.wait, self._checkpointer.find
        self.end_evaluation = self._checkpointer.end_evaluation
        self._fingerprint = fingerprint_of(model, args)
        self.latest: str | None = None  # path or URL of the last saved or resumed checkpoint
        self._documents: Mapping[str, bytes] = {}
        if self._checkpointer.rank == 0:
            name, trusts = _tokenizer_of(datasets)
            self._documents = model_files(model, name, trust_remote_code=trusts)
            if args.export:
                check_out(self._export)
            if args.export and args.ema_decay is not None:
                check_out(self._export_average)

    def __enter__(self) -> RunSaver:
        if self._checkpointer.rank == 0:
            link_checkpoints(Path(self._args.output_dir), self._args.checkpoint_dir)
        self._checkpointer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._checkpointer.__exit__(kind, error, at)

    def save(
        self, step: int, state: Mapping[str, Any], *, best: int | None = None, beside: Mapping[str, bytes] = NOTHING
    ) -> None:
        """Begin to save checkpoint `step`; see Checkpointer.save."""
        state = {**state, "fingerprint": self._fingerprint}
        self._checkpointer.save(
            self._model, self._optimizer, step=step, state=state, documents=self._documents, best=best, beside=beside
        )
        self.latest = self.where(step)

    def where(self, step: int) -> str:
        """Return the path or URL of a step's checkpoint."""
        return f"{self.url}/{folder_name(step)}"

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed on this rank."""
        return self._checkpointer.has_failed

    def tell_failure(self) -> None:
        """Raise CheckpointError: the save in flight has failed on a rank."""
        self._checkpointer.wait()
        raise CheckpointError("the latest checkpoint was not saved: see the error of another rank")

    def resume(self, found: Resumable, load_state: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any]:
        """Load model and optimizer from a checkpoint; return the saved `state` with "step".

        load_state may refuse the state before anything is loaded.
        """

        written_with: list[str] = []

        def check(checkpoint: Checkpoint) -> None:
            written_with.append(checkpoint.state["fingerprint"]["versions"].get("transformers", ""))
            check_same_model(checkpoint.state["fingerprint"], self._fingerprint, where=checkpoint.where)
            load_state(checkpoint.state)

        try:
            loaded = self._checkpointer.resume(
                self._model,
                self._optimizer,
                found,
                check=check,
                resets_other_optimizer=self._args.on_other_optimizer == "reset",
            )
        except CheckpointError as error:
            installed = self._fingerprint["versions"]["transformers"]
            if written_with in ([], [""], [installed]):
                raise
            raise CheckpointError(
                f"{error} (it was written with transformers {written_with[0]}, and {installed} is installed: if model "
                "and settings are the same, the versions may have other parameters: pip install "
                f"transformers=={written_with[0]})"
            ) from error
        self.latest = loaded.where
        differences = other_differences(loaded.state["fingerprint"], self._fingerprint)
        if self._checkpointer.rank == 0:
            logger.info("resumed from step %d (%s)", loaded.step, loaded.where)
            if differences:
                logger.warning("resumed from %s with other settings: %s", loaded.where, "; ".join(differences))
        return loaded.state

    def write_model(self, out: Path) -> None:
        """Write the current model to a transformers folder; all ranks call this."""
        files = {name.removeprefix(f"{MODEL_FOLDER}/"): data for name, data in self._documents.items()}
        save_folder(self._model, out, files)

    def export(self, checkpoint: str) -> None:
        """Write a checkpoint's model to output_dir/export, and the average, if any; only rank 0 calls this."""
        trusts = is_own_code(self._model)
        export_checkpoint(checkpoint, self._export, trust_remote_code=trusts)
        if self._args.ema_decay is not None:
            export_checkpoint(checkpoint, self._export_average, average=True, trust_remote_code=trusts)


def _tokenizer_of(datasets: Datasets) -> tuple[str | None, bool]:
    """Return the tokenizer's name of a dataset's processor, None without a tokenizer, and whether its code is trusted.

    Media processors come first: their folder has the tokenizer and the settings of media.
    """
    every = list(datasets.values()) if isinstance(datasets, Mapping) else [datasets]
    processors = [processor_of(dataset) for dataset in every]
    processors.sort(key=lambda processor: getattr(processor, "family", None) is None)
    tokenizers: list[Any] = [getattr(processor, "tokenizer", None) for processor in processors]
    named = ((each.name, each.trust_remote_code) for each in tokenizers if getattr(each, "name", None))
    return next(named, (None, False))


# Fingerprint of the run of a checkpoint, and differences of another run. JSON values.

# Fields of a model's config that may change in a resumed run.
_NOT_THE_MODEL = {"transformers_version", "_name_or_path", "use_cache", "_attn_implementation"}
# Fields of an adapter's config that may change; the folder of its base may change, its weights may not.
_NOT_THE_ADAPTER = {"peft_version", "base_model_name_or_path", "revision", "inference_mode"}
_NOT_COMPARED = {"output_dir", "checkpoint_dir", "resume"}  # without effect on results


def fingerprint_of(model: PreTrainedModel, settings: TrainConfig) -> dict[str, Any]:
    """Return versions of the code, the model's config, the adapter, and the run's settings.

    The cursor has the plans of the data.
    """
    import transformers

    versions = {"lmms_stream": VERSION, "torch": str(torch.__version__), "transformers": transformers.__version__}
    described = {
        "versions": versions,
        "model": config_of(model) | {"architectures": [type(model).__name__]},
        "train": dataclasses.asdict(settings),
    }
    if (adapter := adapter_of(model)) is not None:
        described["adapter"] = {"config": adapter.config, "base": adapter.base}
    plain: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return plain


def check_same_model(saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """Raise CheckpointError, with names and values, if the model's config, adapter or base weights differ.

    Only fields of both versions' configs are compared.
    """
    before_model, but = saved["model"], _NOT_THE_MODEL
    if (version := str(saved["versions"].get("transformers"))) != now["versions"].get("transformers"):
        before_model = _as_read_now(before_model)
        if HAS_FORMER_CONFIGS and not version.startswith("4."):
            but = but | {name for name, value in now["model"].items() if value is None or name not in saved["model"]}
    differing = _differing(before_model, now["model"], but=but)
    before, after = saved.get("adapter"), now.get("adapter")
    if (before is None) != (after is None):
        differing.append("all of it, now an adapter" if before is None else "an adapter, now all of it")
    elif before is not None and after is not None:
        differing += _differing(before["config"], after["config"], but=_NOT_THE_ADAPTER)
        if before["base"] != after["base"]:
            differing.append(f"weights under its adapter with digest {before['base']}, now {after['base']}")
    if differing:
        raise CheckpointError(
            f"checkpoint {where} is of another model ({'; '.join(differing)}): "
            "restore the model settings, or start over in another output_dir"
        )


def _as_read_now(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a config of another transformers version with the installed version; return the fields except None.

    Versions differ in the fields of their files.
    """
    from transformers import AutoConfig

    try:
        read = AutoConfig.for_model(**config).to_dict()
    except (TypeError, ValueError, LookupError, AttributeError, StrictDataclassError):  # no class of transformers
        read = {**config}
    plain: dict[str, Any] = json.loads(json.dumps(read, default=str))
    return {name: value for name, value in plain.items() if value is not None}


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any], *, but: Set[str]) -> list[str]:
    common = sorted((saved.keys() & now.keys()) - but)
    return [f"{name} {saved[name]!r}, now {now[name]!r}" for name in common if saved[name] != now[name]]


def other_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return differences from the checkpoint's settings and versions, in words; the run may continue.

    A setting newer than the checkpoint has the default in the checkpoint.
    """
    before = {"train": _defaults() | _flat(saved["train"]), "versions": saved["versions"]}
    after = {"train": _flat(now["train"]), "versions": now["versions"]}
    return [
        f"{part}.{name} was {before[part].get(name)!r}, is {after[part].get(name)!r}"
        for part in ("train", "versions")
        for name in sorted(before[part].keys() | after[part].keys())
        if before[part].get(name) != after[part].get(name) and name not in _NOT_COMPARED
    ]


def _flat(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint by their current keys, with dotted keys for sections."""
    flat: dict[str, Any] = {}
    for name, value in with_new_keys(TrainConfig, saved, tells=False).items():
        section = section_of(TrainConfig, name)
        if isinstance(value, Mapping) and section is not None:
            known = with_new_keys(section, value, tells=False)
            flat |= {f"{name}.{key}": each for key, each in known.items()}
        else:
            flat[name] = value
    return flat


def _defaults() -> dict[str, Any]:
    """Return the defaults of settings, in the form of a checkpoint."""
    made = dataclasses.asdict(TrainConfig(output_dir=".", global_batch=1, max_steps=1))
    plain = _flat(json.loads(json.dumps(made, default=str)))
    return {name: value for name, value in plain.items() if name not in {"output_dir", "global_batch", "max_steps"}}
