"""Twelve mutants of each room, drawn by a seed from all places, with the verdicts of the tests."""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

from .operators import OPERATORS, Edit, Place, places

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).with_name("mutants.json")
SEED = 67
PER_ROOM = 12
MOST_STRUCK = 0.1  # share of the mutants that may be struck as equivalent to the code
ROOMS = (
    "lmms_stream/plan", "lmms_stream/loader", "lmms_stream/mds", "lmms_stream/storage", "converters/writing",
    "converters/rows", "lmms_stream/processors", "lmms_stream/train/run", "lmms_stream/train/checkpoint",
    "lmms_stream/train/tasks", "lmms_stream/doors", "lmms_stream/tools", "lmms_stream/plugins",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault of one line: `old` stands once in the file, and becomes `new`.

    killed_by: the first test that failed ("survived" if none did, with the number of tests tried). equivalent: why no
    test can notice it; such a mutant is struck, and the next draw takes its turn.
    """

    room: str
    file: str
    operator: str
    old: str
    new: str
    function: str = ""  # of no function: the module's own code
    killed_by: str = ""
    equivalent: str = ""

    @property
    def name(self) -> str:
        return hashlib.sha256(f"{self.file}\n{self.old}\n{self.new}".encode()).hexdigest()[:8]

    def changes_the_code(self) -> bool:
        """Return whether Python can parse the file with the fault, to another tree than without."""
        data = (ROOT / self.file).read_bytes()
        try:
            return ast.dump(ast.parse(self.applied(data))) != ast.dump(ast.parse(data))
        except SyntaxError:
            return False

    def applied(self, data: bytes) -> bytes:
        """Return a file with the fault."""
        if data.count(self.old.encode()) != 1:
            raise LookupError(f"{self.file} lacks the text of mutant {self.name}: python -m tests.mutants draw")
        return data.replace(self.old.encode(), self.new.encode())


def load() -> list[Mutant]:
    return [Mutant(**row) for row in json.loads(TABLE.read_text())] if TABLE.is_file() else []


def save(mutants: list[Mutant]) -> None:
    rows = [{key: value for key, value in asdict(mutant).items() if value} for mutant in mutants]
    TABLE.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def draw() -> list[Mutant]:
    """Return the table with a mutant of the next draw for each whose text is gone, or that was struck.

    The places of an operator are drawn in the order of a hash of the seed and their text, so other changes of a room
    leave the draw as it is; the operators take turns, in an order that the seed gives to each room.
    """
    table = []
    for room in ROOMS:
        kept = [mutant for mutant in load() if mutant.room == room and is_present(mutant) and mutant.changes_the_code()]
        taken = {mutant.name for mutant in kept}
        candidates = _candidates(room)
        turns = [operator for _, operator in sorted((_rank(room, operator), operator) for operator in OPERATORS)]
        waiting = [operator for operator in islice(cycle(turns), PER_ROOM) if candidates[operator]]
        for mutant in kept:
            if not mutant.equivalent and mutant.operator in waiting:
                waiting.remove(mutant.operator)
        turn = cycle(turns)
        while sum(not mutant.equivalent for mutant in kept) < PER_ROOM:
            operator = waiting.pop(0) if waiting else next(turn)
            drawn = (
                mutant for mutant in candidates[operator] if mutant.name not in taken and mutant.changes_the_code()
            )
            if following := next(drawn, None):
                kept.append(following)
                taken.add(following.name)
        table += kept
    return table


def is_present(mutant: Mutant) -> bool:
    path = ROOT / mutant.file
    return path.is_file() and path.read_bytes().count(mutant.old.encode()) == 1


def _candidates(room: str) -> dict[str, list[Mutant]]:
    """Return the mutants of each operator, in the order in which they are drawn."""
    mutants: dict[str, list[Mutant]] = {operator: [] for operator in OPERATORS}
    for path in sorted((ROOT / room).rglob("*.py")):
        data = path.read_bytes()
        for place in places(data):
            mutants[place.operator].append(_mutant(room, path, data, place))
    for of_operator in mutants.values():
        of_operator.sort(key=lambda mutant: _rank(mutant.file, mutant.old, mutant.new))
    return mutants


def _mutant(room: str, path: Path, data: bytes, place: Place) -> Mutant:
    """Return a mutant with as many whole lines as make its text unique in the file."""
    edit = place.edit
    start, end = data.rfind(b"\n", 0, edit.start) + 1, (data + b"\n").find(b"\n", edit.end)
    while data.count(data[start:end]) > 1 and start:
        start = data.rfind(b"\n", 0, start - 1) + 1
    new = data[start : edit.start] + edit.text.encode() + data[edit.end : end]
    return Mutant(
        room=room, file=str(path.relative_to(ROOT)), function=place.function, operator=place.operator,
        old=data[start:end].decode(), new=new.decode(),
    )  # fmt: skip


def edit_of(mutant: Mutant) -> Edit | None:
    """Return the edit of a mutant in its file as it is now."""
    data = (ROOT / mutant.file).read_bytes()
    for place in places(data):
        if _mutant(mutant.room, ROOT / mutant.file, data, place).name == mutant.name:
            return place.edit
    return None


def _rank(*words: str) -> str:
    return hashlib.sha256("\n".join((str(SEED), *words)).encode()).hexdigest()
