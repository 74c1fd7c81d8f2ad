"""Write the golden files: `python -m tests.golden.make FOLDER`, a new folder.

The files in the repository were written by this script at commit 67b50f60, before any other change of the project. Do
not write them again when a test fails: a later commit would then compare itself with itself. Cases of something new go
into new files: shares.json beside stored/ holds `new_digests` of the first commit with shares of tokens.

Two runs at 67b50f60 write equal files, but for: `_lmms/dataset.json` of datasets ("asked" and "given once" are random
for rows of memory; chat and grown name their sources in FOLDER, as does their `_lmms/provenance.json`), checkpoints and
logs of runs (seconds, memory, names in `.metadata`), and sums.json.
"""

from __future__ import annotations

import sys
from contextlib import chdir
from pathlib import Path

from .config_cases import config_values, write_configs
from .datasets import PROCESSORS, facts_of, mosaic_facts, write_datasets
from .digests import file_sums, write_json
from .door_cases import door_states
from .pack_cases import GROUPS, pack_digests
from .run_cases import write_runs
from .state_cases import LOADERS, MIXTURES, following, mixture_digests, mixture_state, stored_state


def write_states(root: Path) -> None:
    mixtures = {}
    for name, mixture in MIXTURES.items():
        state = mixture_state(mixture)
        mixtures[name] = {"state": state, "digests": mixture_digests(mixture, state)}
    write_json(root / "mixtures.json", mixtures)
    loaders = {}
    for name, loader in LOADERS.items():
        state = stored_state(loader, root)
        loaders[name] = {"state": state, "following": following(loader, root, state)}
    write_json(root / "loaders.json", loaders)


def write_all(root: Path) -> None:
    root.mkdir(parents=True)  # a folder that exists is refused
    write_json(root / "packs.json", {group: pack_digests(group) for group in GROUPS})
    write_datasets(root)
    write_json(root / "datasets.json", {name: facts_of(name, root) for name in PROCESSORS})
    write_json(root / "mosaic.json", mosaic_facts(root))
    write_states(root)
    with chdir(root):
        write_json(root / "doors.json", door_states())
    write_runs(root)
    write_configs(root)
    write_json(root / "configs.json", config_values(root))
    write_json(root / "sums.json", file_sums(root))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name a new folder: python -m tests.golden.make FOLDER")
    write_all(Path(sys.argv[1]).resolve())
