"""Paths and URLs of checkpoints, as runs and users name them."""

from __future__ import annotations

from pathlib import Path

from .store import step_of

CHECKPOINTS_NAME = "checkpoints"  # in an output_dir, where no checkpoint_dir is named


def checkpoints_url(output_dir: str, checkpoint_dir: str | None) -> str:
    """The folder or URL of a run's checkpoints, by its settings."""
    return checkpoint_dir or str(Path(output_dir) / CHECKPOINTS_NAME)


def split_path(checkpoint: str) -> tuple[str, int | None]:
    """The folder or URL that a checkpoint lies in, and its step; None for what no checkpoint is named like."""
    folder, _, name = checkpoint.rstrip("/").rpartition("/")
    return folder or ".", step_of(name)
