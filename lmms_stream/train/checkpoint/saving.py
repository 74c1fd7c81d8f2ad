"""What a run saves and resumes: its model, optimizer and state, with what describes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ...errors import CheckpointError
from ...mds.core import processor_of
from ..run.average import Average
from ..run.settings import Datasets, TrainConfig
from .checkpoint import Checkpointer
from .export import check_out, export_checkpoint, is_own_code, model_files
from .fingerprint import check_same_model, fingerprint_of, other_differences
from .folder import save_folder
from .paths import checkpoints_url
from .store import MODEL_FOLDER, Checkpoint, folder_name
from .tensors import NOTHING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STAGING_NAME = "checkpoints-on-their-way"
EXPORT_NAME, EXPORT_AVERAGE_NAME = "export", "export-ema"
logger = logging.getLogger("lmms_stream")


class RunSaver:
    """The checkpoints of a run, and the export at its end. A context: leaving it waits for the save in flight.

    model: the transformers model without wrappers, so that parameters are saved under its own names.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        args: TrainConfig,
        *,
        datasets: Datasets,
        average: Average | None = None,
    ):
        self._model, self._optimizer, self._args = model, optimizer, args
        output_dir = Path(args.output_dir)
        self.url = checkpoints_url(args.output_dir, args.checkpoint_dir)
        self._export, self._export_average = output_dir / EXPORT_NAME, output_dir / EXPORT_AVERAGE_NAME
        self._checkpointer = Checkpointer(
            self.url,
            staging=output_dir / STAGING_NAME,
            keep=args.save_total_limit,
            asynchronous=args.async_save,
            timeout_s=args.timeout_s,
            average=average,
        )
        self._fingerprint = fingerprint_of(model, args)
        self._latest: str | None = None  # the checkpoint that was saved or resumed last
        self._documents: Mapping[str, bytes] = {}
        if self._checkpointer.rank == 0:
            self._documents = model_files(model, _tokenizer_name(model, datasets))
            if args.export:
                check_out(self._export)
            if args.export and args.ema_decay is not None:
                check_out(self._export_average)

    def __enter__(self) -> RunSaver:
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
        self._latest = self.where(step)

    def steps(self) -> list[int]:
        """See Checkpointer.steps."""
        return self._checkpointer.steps()

    def where(self, step: int) -> str:
        """The path or URL of the checkpoint of a step."""
        return f"{self.url}/{folder_name(step)}"

    def probe(self) -> None:
        """See Checkpointer.probe."""
        self._checkpointer.probe()

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has failed on this rank."""
        return self._checkpointer.has_failed

    def tell_failure(self) -> None:
        """CheckpointError: the save in flight has failed on some rank."""
        self._checkpointer.wait()
        raise CheckpointError("the latest checkpoint was not saved: see the error of another rank")

    def wait(self) -> None:
        """Return when nothing is being saved; CheckpointError when that failed."""
        self._checkpointer.wait()

    def resume(
        self, load_state: Callable[[Mapping[str, Any]], None], *, choice: str | None = None
    ) -> Mapping[str, Any] | None:
        """Load model and optimizer; returns the saved `state` with "step", or None where there is no checkpoint.

        load_state may refuse the state before anything is loaded. choice: instead of args.resume.
        """

        written_with: list[str] = []

        def check(checkpoint: Checkpoint) -> None:
            written_with.append(checkpoint.state["fingerprint"]["versions"].get("transformers", ""))
            check_same_model(checkpoint.state["fingerprint"], self._fingerprint, where=checkpoint.where)
            load_state(checkpoint.state)

        try:
            found = self._checkpointer.resume(
                self._model,
                self._optimizer,
                choice=choice or self._args.resume,
                check=check,
                resets_other_optimizer=self._args.on_other_optimizer == "reset",
            )
        except CheckpointError as error:
            installed = self._fingerprint["versions"]["transformers"]
            if written_with in ([], [installed]):
                raise
            raise CheckpointError(
                f"{error} (it was written with transformers {written_with[0]}, and the models of {installed}, which is "
                f"installed, may have other parts: pip install transformers=={written_with[0]} to go on)"
            ) from error
        if found is None:
            return None
        self._latest = found.where
        differences = other_differences(found.state["fingerprint"], self._fingerprint)
        if self._checkpointer.rank == 0:
            logger.info("resumed from step %d (%s)", found.step, found.where)
            if differences:
                logger.warning("resumed from %s with other settings: %s", found.where, "; ".join(differences))
        return found.state

    def write_model(self, out: Path) -> None:
        """Write the model as it is now as a transformers folder; all ranks call it."""
        files = {name.removeprefix(f"{MODEL_FOLDER}/"): data for name, data in self._documents.items()}
        save_folder(self._model, out, files)

    def export(self) -> None:
        """Write the model as it was saved last to output_dir/export where args.export is set; rank 0 does it.

        Its average beside, where there is one.
        """
        if self._args.export and self._checkpointer.rank == 0 and self._latest is not None:
            trusts = is_own_code(self._model)
            export_checkpoint(self._latest, self._export, trust_remote_code=trusts)
            if self._args.ema_decay is not None:
                export_checkpoint(self._latest, self._export_average, average=True, trust_remote_code=trusts)


def _tokenizer_name(model: PreTrainedModel, datasets: Datasets) -> str | None:
    """Return the name of the tokenizer of a dataset's processor, or else that of the pretrained model.

    A processor of media comes before those of texts: its folder has the tokenizer, and settings of the media besides.
    """
    every = list(datasets.values()) if isinstance(datasets, Mapping) else [datasets]
    processors = [processor_of(dataset) for dataset in every]
    processors.sort(key=lambda processor: getattr(processor, "family", None) is None)
    names = [getattr(getattr(processor, "tokenizer", None), "name", None) for processor in processors]
    return next(filter(None, names), None)
