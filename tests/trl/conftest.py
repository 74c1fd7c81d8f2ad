"""The tiny model and tokenizer of tests/train/habits; the process group of a trainer ends with its test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ..train.habits.conftest import _environment_stays as _environment_stays
from ..train.habits.conftest import model_folder as model_folder
from ..train.habits.conftest import tok as tok


@pytest.fixture(autouse=True)
def _group_ends() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
