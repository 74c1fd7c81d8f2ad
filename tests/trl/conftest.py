"""The tiny model and tokenizer of tests/train/habits."""

from ..train.habits.conftest import _environment_stays as _environment_stays
from ..train.habits.conftest import model_folder as model_folder
from ..train.habits.conftest import tok as tok
