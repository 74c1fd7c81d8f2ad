"""Draw mutants, or run the tests against them: `python -m tests.mutants draw`, `python -m tests.mutants run`.

A mutant that was killed before and survives now is an error; `run --write` writes the verdicts into mutants.json.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from .run import run
from .table import MOST_STRUCK, draw, load, save


def main() -> None:
    if "draw" in sys.argv:
        mutants = draw()
        struck = sum(bool(mutant.equivalent) for mutant in mutants)
        if struck > MOST_STRUCK * len(mutants):
            sys.exit(f"{struck} of {len(mutants)} mutants are struck as equivalent, {MOST_STRUCK:.0%} are the most")
        save(mutants)
        return
    table = load()
    verdicts = run([mutant for mutant in table if not mutant.equivalent])
    lost = [
        f"{mutant.file} {mutant.operator}: {verdicts[mutant.name]}, was killed by {mutant.killed_by}"
        for mutant in table
        if mutant.killed_by.startswith("tests/") and not verdicts.get(mutant.name, "tests/").startswith("tests/")
    ]
    if "--write" in sys.argv:
        save([replace(mutant, killed_by=verdicts.get(mutant.name, "")) for mutant in table])
    killed = sum(killer.startswith("tests/") for killer in verdicts.values())
    sys.stdout.write("\n".join([*lost, f"{killed} of {len(verdicts)} mutants are killed"]) + "\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
