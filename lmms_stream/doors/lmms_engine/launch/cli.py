"""LMMS Engine's launcher: `python -m lmms_stream.lmms_engine.launch.cli config_yaml=FILE trainer_args.max_steps=9`.

Also runs under torchrun. Equivalent to `lmms-stream train FILE trainer_args.max_steps=9`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import ConfigError
from ....processes.family import end_process
from ....train import __main__ as command

if TYPE_CHECKING:
    from ..train import TrainRunner

_FILE = "config_yaml"


def create_train_task(config: Mapping[str, Any]) -> TrainRunner:
    """Return the run of a launch file's sections; its build() and run() train."""
    from ..train import TrainRunner

    return TrainRunner(config)


def arguments_of(said: Sequence[str]) -> list[str]:
    """Convert LMMS Engine's command line to arguments of `lmms-stream train`: the file, then settings.

    ConfigError without a file, and for Hydra's ~KEY, which deletes a key.
    """
    settings = [each.lstrip("+") for each in said if not each.startswith(f"{_FILE}=")]
    files = [each.partition("=")[2] for each in said if each.startswith(f"{_FILE}=")]
    for each in settings:
        if each.startswith("~"):
            raise ConfigError(f"{each} deletes a key, which is not supported: set the key to null, as {each[1:]}=null")
    if {"-h", "--help"} & {*settings}:
        return ["--help"]
    if not files:
        raise ConfigError(f"no launch file is named: pass {_FILE}=FILE, and overrides such as trainer_args.max_steps=9")
    return [files[-1], *settings]


def main() -> int:
    """Train; return the exit status."""
    try:
        sys.argv[1:] = arguments_of(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return command.start()


if __name__ == "__main__":
    end_process(main())
