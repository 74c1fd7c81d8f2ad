"""RolloutManager: prompts of a source -> generated and rewarded groups, one batch per rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...checks import whole_number
from ...errors import ConfigError, DataError
from .arguments import refuse_unheard, setting
from .data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from .in_flight import Group
from .opening import filter_samples, load_function, open_eval_datasets
from .sample import Sample

Generate = Callable[[Any, list[Sample]], None]
Reward = Callable[[Any, Sample], Any]
_DONE = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED)


class RolloutManager:
    """Rollouts of args.rollout_batch_size finished groups.

    generate: (args, samples) -> None; it writes responses, tokens and status of samples, and marks samples to resume
    later as ABORTED. reward: (args, sample) -> the reward of a finished sample. name: name of this manager among
    several that share the source.

    Groups are in flight (see RolloutDataSourceWithBuffer) until a state of their rollout is saved. A run killed before
    then loses no prompt.
    """

    def __init__(
        self,
        args: Any,
        source: RolloutDataSourceWithBuffer,
        generate: Generate,
        reward: Reward,
        *,
        name: str = "rollout",
    ):
        if isinstance(source, RolloutDataSource) and not source.has_buffer:
            raise ConfigError(f"{type(source).__name__} takes no groups back: give a RolloutDataSourceWithBuffer")
        self.args = args
        self.source = source
        self.num_filtered = 0  # groups dropped by --dynamic-sampling-filter-path
        self._generate = generate
        self._reward = reward
        self._name = name
        for each, function in (("generate", generate), ("reward", reward)):
            if not callable(function):
                raise ConfigError(f"{each} must be a function, got {function!r}: see RolloutManager")
        if setting(args, "rollout_batch_size") is None:
            raise ConfigError("rollout_batch_size must be at least 1, got None: set --rollout-batch-size")
        for each in ("rollout_batch_size", "over_sampling_batch_size", "n_samples_per_eval_prompt"):
            if (number := setting(args, each)) is not None:
                whole_number(each, number, least=1)
        self._batch_size: int = setting(args, "rollout_batch_size")
        refuse_unheard(args, ["partial_rollout_max_aborted_count", "rollout_all_samples_process_path"])
        path = setting(args, "dynamic_sampling_filter_path")
        self._keeps = None if path is None else load_function(path)

    def generate(self, rollout_id: int | None = None) -> list[Group]:
        """Return the next rollout_batch_size finished groups.

        Request over_sampling_batch_size prompts at a time. Unfinished groups go back to the source and come first: with
        their partial responses if --partial-rollout is set, else as prompts. Finished groups beyond the batch also go
        back and are part of the next batch. rollout_id: argument of the source's `save` after these groups are trained
        on; None: they count as trained on at once.
        An error puts all groups back into the source. DataError if generate leaves all samples unchanged.
        """
        done: list[Group] = []
        try:
            while len(done) < self._batch_size:
                num_groups = setting(self.args, "over_sampling_batch_size") or self._batch_size
                done += self._round(self.source.get_samples(num_groups, holder=self._name), rollout_id)
            filter_samples(self.args, done[: self._batch_size])
        except BaseException:
            self.source.put_back(self._name)
            raise
        self.source.add_samples(done[self._batch_size :])
        self.source.finish(done[: self._batch_size], rollout_id)
        return done[: self._batch_size]

    def eval(self) -> dict[str, dict[str, list[Any]]]:
        """Return the samples of each dataset of --eval-prompt-data, their rewards, and whether each was truncated."""
        found = {}
        for name, dataset in open_eval_datasets(self.args).items():
            copies = range(setting(self.args, "n_samples_per_eval_prompt"))
            samples = [sample.copy() for sample in dataset for _ in copies]
            for index, sample in enumerate(samples):
                sample.group_index, sample.index = index // len(copies), index
            while waiting := [sample for sample in samples if sample.status not in _DONE]:
                self._go_on(waiting)
            for sample in samples:
                self._rewarded(sample)
            found[name] = {
                "samples": samples,
                "rewards": [sample.get_reward_value(self.args) for sample in samples],
                "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
            }
        return found

    def _round(self, groups: list[Group], rollout_id: int | None) -> list[Group]:
        """Resume groups; return the finished and kept groups, and put unfinished groups back."""
        waiting = [sample for group in groups for sample in group if sample.status not in _DONE]
        if setting(self.args, "mask_offpolicy_in_partial_rollout"):
            for sample in waiting:
                sample.loss_mask = [0] * sample.response_length if sample.response_length else sample.loss_mask
        if waiting:
            self._go_on(waiting)
        done: list[Group] = []
        unfinished: list[Group] = []
        for group in groups:
            (done if all(sample.status in _DONE for sample in group) else unfinished).append(group)
        self.source.add_samples([self._unfinished(group, rollout_id) for group in unfinished])
        for group in done:
            for sample in group:
                self._rewarded(sample)
        return [group for group in done if self._is_kept(group)]

    def _go_on(self, samples: Sequence[Sample]) -> None:
        before = [(sample.status, sample.response_length, len(sample.response)) for sample in samples]
        self._generate(self.args, [*samples])
        if before == [(sample.status, sample.response_length, len(sample.response)) for sample in samples]:
            raise DataError(
                f"generate has left all {len(samples)} samples as they were: set status, response and response_length"
            )

    def _unfinished(self, group: Group, rollout_id: int | None) -> Group:
        for sample in group:
            sample.abort_count += sample.status is Sample.Status.ABORTED
            if rollout_id is not None and sample.response:
                sample.metadata.setdefault("start_rollout_id", rollout_id)
        if setting(self.args, "partial_rollout"):
            return group
        return [sample if sample.status in _DONE else _anew(sample) for sample in group]

    def _rewarded(self, sample: Sample) -> None:
        if sample.reward is None:
            sample.reward = self._reward(self.args, sample)

    def _is_kept(self, group: Group) -> bool:
        if self._keeps is None:
            return True
        found = self._keeps(self.args, group)
        if getattr(found, "keep", found):
            return True
        self.num_filtered += 1
        self.source.finish([group])
        return False


def _anew(sample: Sample) -> Sample:
    """Return the sample as a prompt, without its response."""
    metadata = {name: value for name, value in sample.metadata.items() if name != "start_rollout_id"}
    media = sample.multimodal_inputs, sample.teacher_multimodal_inputs
    made = Sample.of(sample.prompt, sample.label, metadata, *media).copy()
    made.group_index, made.index, made.abort_count = sample.group_index, sample.index, sample.abort_count
    return made
