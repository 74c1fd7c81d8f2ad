"""Manifests: tables that name media and texts by ids, and nested objects -> rows. MANIFESTS lists the known forms.

This process joins the rows, and keeps the joined columns in memory.
"""

from __future__ import annotations

import io
import json
import mimetypes
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from csv import QUOTE_NONE, DictReader
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import PurePosixPath
from shlex import quote
from typing import Any

from ...errors import DataError, LmmsStreamError, ObjectMissingError
from ...processors.json_text import JsonScanner, parsed
from ...storage.local import LocalStorage
from ...storage.storage import Storage
from ...types import StoredObject
from ...yaml_text import read_yaml
from .files import DecompressedFile, LocalFile, StoredFile
from .jsonl import LineBlock
from .lists import OF_ROWS
from .table import MAX_ROW_BYTES, Location, carry, in_units
from .units import Row, Unit

_HEAD_BYTES = 1 << 16  # first bytes of a manifest, which show its form
_MOST_HEADS = 16  # files of one name pattern whose first bytes are read; a folder of more files holds other rows
_MEDIA = re.compile(r"(image|audio|video)/|None")  # also files of an unknown type
Rows = Iterator[dict[str, Any] | str]  # a text is the error of a row


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Files around a manifest. listed: all files of the folder; None: listed when a medium is looked for.

    media_root: the user's folder of media. split: the user's split, of a manifest with several.
    """

    store: Storage
    listed: Sequence[StoredObject] | None
    media_root: str | None
    split: str | None

    @property
    def url(self) -> str:
        return str(self.store.folder.absolute()) if isinstance(self.store, LocalStorage) else self.store.url

    def has(self, key: str) -> bool:
        """Return whether a file exists, or a folder with files (a key with a slash at its end)."""
        try:
            return any(self.store.list_objects(key)) if key.endswith("/") else bool(self.store.stat(key))
        except ObjectMissingError:
            return False

    def open(self, key: str) -> DecompressedFile:
        file = LocalFile(self.store.folder / key) if isinstance(self.store, LocalStorage) else None
        return DecompressedFile(file or StoredFile(self.store, self.store.stat(key)), name=f"{self.url}/{key}")

    def read(self, key: str, num_bytes: int = -1) -> bytes:
        """Return the first bytes of a file; b"" for a pipe, which can be read only once."""
        if isinstance(self.store, LocalStorage) and not (self.store.folder / key).is_file():
            return b""
        with self.open(key) as file:
            return file.read(num_bytes) or b""

    def lines(self, key: str) -> Iterator[str]:
        """Yield the filled lines of a text."""
        with io.TextIOWrapper(io.BufferedReader(self.open(key)), "utf-8-sig") as file:
            try:
                yield from (line.rstrip("\n") for line in file if not line.isspace())
            except UnicodeDecodeError as error:
                raise DataError(f"{self.url}/{key}: not valid UTF-8 ({error}): write it as UTF-8") from error

    def members(self, key: str) -> Iterator[tuple[str, Any]]:
        """Yield the members of a JSON object, and each element of a member with an array."""
        with self.open(key) as stream:
            scanner = JsonScanner(stream, name=f"{self.url}/{key}", max_bytes=MAX_ROW_BYTES)
            for name in scanner.members():
                texts = scanner.elements() if scanner.peek() == b"[" else iter([scanner.value(b"}")])
                yield from ((name, parsed(text)) for text in texts)

    @cached_property
    def _media(self) -> Mapping[str, Sequence[str]]:
        """Last names -> keys of all media."""
        keys: dict[str, list[str]] = defaultdict(list)
        for file in self.store.list_objects("") if self.listed is None else self.listed:
            if _MEDIA.match(str(mimetypes.guess_type(file.key)[0])):
                keys[PurePosixPath(file.key).name].append(file.key)
        return keys

    def medium(self, folder: str, *names: str) -> str:
        """Return the key of the only medium with one of these names; else the first name, below a folder.

        Folders in a name decide between several media. With the user's folder of media, names stay unchanged.
        """
        if self.media_root is not None:
            return names[0]
        for name in names:
            found, whole = self._media.get(PurePosixPath(name).name, ()), f"/{folder}{name}"
            for begin, end in ((whole, whole), ("/", f"/{name}"), (f"/{folder}", "")):
                found = [key for key in found if f"/{key}".startswith(begin) and f"/{key}".endswith(end)] or found
            if len(found) == 1:
                return found[0]
        return names[0] if names[0].startswith("/") else folder + names[0]


# Forms: the rows of a manifest, by its folder and its key.


def _kaldi(tables: Tables, folder: str, key: str) -> Rows:
    if tables.has(f"{folder}segments"):
        raise DataError(
            f"{tables.url}/{folder}segments: cuts sounds into utterances, and only whole sounds are read: write each "
            "utterance to a file, list these files in wav.scp, and remove segments"
        )
    texts, sounds = ((line.split(maxsplit=1) for line in tables.lines(name)) for name in (f"{folder}text", key))
    known = {name: " ".join(text) for name, *text in texts}
    for name, sound in sounds:
        text = known.pop(name, None)
        if sound.rstrip().endswith("|"):
            yield f"the sound of {name} is a command, and commands are not run: write its sound to a file"
        elif text is None:
            yield f"utterance {name} has no line in {folder}text: add the line, or remove the utterance"
        else:
            yield {"id": name, "audio": tables.medium(folder, sound.strip()), "text": text}
    yield from (f"utterance {name} of {folder}text has no sound in wav.scp: add it" for name in known)


def _transcripts(separator: str | None, below: str, extension: str) -> Callable[[Tables, str, str], Rows]:
    """Return the rows of lines of a sound's name and its text, the last field. below: folder of the sounds."""

    def rows(tables: Tables, folder: str, key: str) -> Rows:
        for line in tables.lines(key):
            name, *texts = line.split(separator, -1 if separator else 1)
            sound = tables.medium(folder + below, f"{name}{extension}")
            yield {"id": name, "audio": sound, "text": texts[-1]} if texts else f"no text after {name[:60]!r}: add it"

    return rows


def _common_voice(tables: Tables, folder: str, key: str) -> Rows:
    for row in DictReader(tables.lines(key), delimiter="\t", quoting=QUOTE_NONE):
        if None in row or None in row.values():
            yield "the row has another number of fields than the header: correct the row"
        else:
            yield {"audio": tables.medium(f"{folder}clips/", row.pop("path")), "text": row.pop("sentence"), **row}


def _science_qa(tables: Tables, folder: str, key: str) -> Rows:
    splits: dict[str, set[str]] = defaultdict(set)
    for name, pid in tables.members(f"{folder}pid_splits.json"):
        splits[name].add(str(pid))
    split = {"validation": "val"}.get(str(tables.split), tables.split)
    if split not in splits:
        found = ", ".join(f"{name} ({len(ids)} rows)" for name, ids in splits.items())
        example = quote(f"{tables.url}/{folder}".rstrip("/") + f"?split={next(iter(splits))}")
        raise DataError(f"{tables.url}/{key}: holds splits {found}: name one, as {example}")
    for name, row in tables.members(key):
        if name in splits[split]:
            image = row.get("image") and tables.medium(f"{folder}images/", f"{row.get('split')}/{name}/{row['image']}")
            yield {"id": name, **row, "image": image}


def _instruct_lab(tables: Tables, folder: str, key: str) -> Rows:
    for example in read_yaml(tables.read(key))["seed_examples"]:
        context = [str(example["context"]).strip()] if example.get("context") else []
        for pair in example.get("questions_and_answers") or [example]:
            prompt = "\n\n".join([*context, str(pair["question"]).strip()])
            yield {"prompt": prompt, "response": str(pair["answer"]).strip()}


def _of_yaml(tables: Tables, folder: str, key: str) -> Rows:
    """Yield the rows of a YAML list, the conversations of ChatterBot, or the examples of Rasa's intents."""
    content = read_yaml(tables.read(key))
    if isinstance(content, list):
        yield from content
    elif "nlu" in content:
        examples = [
            (row["intent"], line)
            for row in content["nlu"]
            if "intent" in row
            for line in row["examples"].splitlines()
            if line.startswith("- ")
        ]
        yield from ({"text": _ENTITY.sub(r"\1", line[2:].strip()), "intent": intent} for intent, line in examples)
    else:
        yield from ({"dialog": [str(text) for text in texts]} for texts in content["conversations"])


_ENTITY = re.compile(r"\[([^\]]*)\](?:\([^)]*\)|\{[^}]*\})")  # Rasa's: [text](entity)


def _intents(tables: Tables, folder: str, key: str) -> Rows:
    """Yield each pattern of an intent with a response, in turn; each pattern and each response at least once."""
    content = parsed(tables.read(key))
    for intent in content["intents"] if isinstance(content, dict) else content:
        asked, answered = intent["patterns"], intent["responses"]
        for number in range(max(len(asked), len(answered)) if asked and answered else 0):
            pair = {"prompt": asked[number % len(asked)], "response": answered[number % len(answered)]}
            yield pair | {"intent": intent.get("tag", intent.get("name", intent.get("intent")))}


def _nested(tables: Tables, folder: str, key: str) -> Rows:
    """Yield each object of the list in a row, with the other columns of the row."""
    with tables.open(key) as stream:
        for text in JsonScanner(stream, name=f"{tables.url}/{key}", max_bytes=MAX_ROW_BYTES).elements():
            row = parsed(text)
            name = next(name for name, value in row.items() if isinstance(value, list))
            yield from ({**{other: row[other] for other in row if other != name}, **each} for each in row[name])


def _coco(tables: Tables, folder: str, key: str) -> Rows:
    """Yield a row for each annotation with a text; if none has a text, a row of the objects of each image, in JSON."""
    files: dict[Any, str] = {}
    classes: dict[Any, str] = {}
    for member, value in tables.members(key):
        if member in ("images", "categories"):
            (files if member == "images" else classes)[value["id"]] = value.get("file_name", value.get("name"))
    objects: dict[Any, list[dict[str, Any]]] = {number: [] for number in files}
    has_text = False
    for member, value in tables.members(key):
        number = value["image_id"] if member == "annotations" else None
        if number is not None and number not in files:
            yield f"annotation {value.get('id')} is of image {number}, which is not in images: remove it"
        elif number is not None and not {"caption", "question"}.isdisjoint(value):
            has_text = True
            text = {"text": value["caption"]} if "caption" in value else value
            yield {"image": tables.medium(folder, files[number]), **text}
        elif number is not None and "bbox" in value:
            objects[number].append({"label": classes.get(value.get("category_id")), "bbox": value["bbox"]})
    for number, name in files.items() if not has_text else ():
        yield {"image": tables.medium(folder, name), "objects": json.dumps(objects[number], ensure_ascii=False)}


def _vqa(tables: Tables, folder: str, key: str) -> Rows:
    answers: dict[Any, str] = {}
    for member, value in tables.members(_answers_of(key)):
        if member == "annotations":
            given = [answer["answer"] for answer in value.get("answers", ())]
            answers[value["question_id"]] = value.get("multiple_choice_answer") or Counter(given).most_common(1)[0][0]
    year = re.search(r"(train|val|test)\d{4}", key)
    for member, value in tables.members(key):
        if member == "questions" and value["question_id"] not in answers:
            yield f"question {value['question_id']} has no answer in {_answers_of(key)}: remove it"
        elif member == "questions":
            number = str(value["image_id"])
            names = [f"COCO_{year[0]}_{number.zfill(12)}.jpg"] if year else []
            image = tables.medium(folder, *names, f"{number.zfill(12)}.jpg", f"{number}.jpg")
            yield {"image": image, "question": value["question"], "answer": answers[value["question_id"]]}


def _answers_of(key: str) -> str:
    return re.sub(r"questions(?=[^/]*$)", "annotations", re.sub(r"(OpenEnded|MultipleChoice)_(?=[^/]*$)", "", key))


def _squad(tables: Tables, folder: str, key: str) -> Rows:
    paragraphs = (each for name, article in tables.members(key) if name == "data" for each in article["paragraphs"])
    for context, asked in ((each["context"], asked) for each in paragraphs for asked in each["qas"]):
        answers = {name: [answer.get(name) for answer in asked["answers"]] for name in ("text", "answer_start")}
        yield {"id": asked.get("id"), "context": context, "question": asked["question"], "answers": answers}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Known form of files. file: pattern of the last name. head: pattern of the first bytes.

    needs: from the folder and the key, the key of a file or folder that a row is joined with. holds_splits: the rows of
    a file are of several splits. is_alone: only files without other files of rows next to them.
    """

    rows: Callable[[Tables, str, str], Rows]
    file: str
    head: bytes = b""
    needs: Callable[[str, str], str] | None = None
    holds_splits: bool = False
    is_alone: bool = False


_NO_CHATS = rb'(?s)(?!.*(\n\{|"(messages|conversations)"\s*:))'  # neither JSON lines nor a chat with its images
MANIFESTS = (
    Manifest(rows=_kaldi, file=r"wav\.scp", needs=lambda folder, key: f"{folder}text"),
    Manifest(rows=_transcripts(None, "", ".flac"), file=r".+\.trans\.txt"),
    Manifest(rows=_common_voice, file=r".+\.tsv", head=rb"(?=[^\n]*\bpath\t)[^\n]*\bsentence\b",
             needs=lambda folder, key: f"{folder}clips/"),
    Manifest(rows=_transcripts("|", "wavs/", ".wav"), file=r"metadata\.csv", head=rb"[^\n|]+\|",
             needs=lambda folder, key: f"{folder}wavs/"),
    Manifest(rows=_vqa, file=r".*questions\.json", needs=lambda folder, key: _answers_of(key)),
    Manifest(rows=_science_qa, file=r"problems\.json", needs=lambda folder, key: f"{folder}pid_splits.json",
             holds_splits=True),
    Manifest(rows=_instruct_lab, file=r".+\.ya?ml", head=rb"(?s)(.*\n)?seed_examples\s*:"),
    Manifest(rows=_of_yaml, file=r".+\.ya?ml", head=OF_ROWS, is_alone=True),
    Manifest(rows=_intents, file=r".+\.json", is_alone=True,
             head=rb'(?s)\s*(\{\s*"intents"\s*:\s*)?\[\s*\{[^{}]*"patterns"\s*:\s*\['),
    Manifest(rows=_nested, file=r".+\.json", is_alone=True,
             head=rb'(?s)\s*\[\s*\{(\s*"\w+"\s*:\s*("[^"]*"|[\d.]+)\s*,)*\s*"(?!conv|dialog|turns|mess|hist)\w+"\s*:'
                  rb'\s*\[\s*\{\s*"(source|src|question|instruction|prompt)"\s*:\s*"'),
    Manifest(rows=_coco, file=r".+\.json", head=_NO_CHATS + rb'\s*\{.*"images"\s*:\s*\[\s*\{[^{}]*"file_name"\s*:'),
    Manifest(rows=_squad, file=r".+\.json",
             head=rb'(?s)\s*\{.*"data"\s*:\s*\[\s*\{(\s*"title"[^{}[\]]*,)?\s*"paragraphs"'),
)  # fmt: skip


def folder_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


def manifests_in(tables: Tables, keys: Sequence[str]) -> tuple[Manifest, list[str]] | None:
    """Return the manifest of files by their names and first bytes, and these files; None for other files."""
    head_of = cache(lambda key: tables.read(key, _HEAD_BYTES))
    for manifest in MANIFESTS:
        found = [key for key in keys if re.fullmatch(manifest.file, PurePosixPath(key).name)]
        if manifest.head:
            found = found if len(found) <= _MOST_HEADS else []
            found = [key for key in found if re.match(manifest.head, head_of(key))]
        if manifest.is_alone and len(found) < len(keys):
            continue
        if manifest.needs is not None:
            found = [key for key in found if tables.has(manifest.needs(folder_of(key), key))]
        if found:
            return manifest, found
    return None


class ManifestTable:
    """Rows of manifests of one form. keys: of the files."""

    def __init__(self, location: Location, manifest: Manifest, tables: Tables, keys: Sequence[str]):
        self._location, self._manifest, self._tables, self._keys = location, manifest, tables, keys

    def num_rows(self) -> int:
        return sum(1 for _ in self._rows())

    def units(self, start: int, stop: int | None) -> Iterator[Unit]:
        folder = self._tables.media_root or self._tables.url
        for block in in_units(islice(self._rows(), start, stop), len, unit_bytes=self._location.unit_bytes):
            yield LineBlock(carry(b"".join(block), self._location), sum(map(len, block)), folder, _row)

    def _rows(self) -> Iterator[bytes]:
        for key in self._keys:
            rows = self._manifest.rows(self._tables, folder_of(key), key)
            try:
                yield from (json.dumps(row).encode() + b"\n" for row in rows)
            except LmmsStreamError:
                raise
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                raise DataError(f"{self._tables.url}/{key}: an entry has another form ({what}): correct it") from error


def _row(number: int, line: bytes) -> Row:
    values = parsed(line)
    return Row(number, None, values) if isinstance(values, str) else Row(number, values)
