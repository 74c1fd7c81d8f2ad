"""Chats with images of which some are bad: damaged, of another length than was measured, or endless to decode."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from streaming import MDSWriter

from tests.processors.tiny_vlm import picture, stored

SIDE = 2000  # pixels of the JPEG
NUM_SCANS = 20_000  # some minutes of decoding
COLUMNS = {"messages": "str", "media": "bytes"}


def good_chats(count: int, *, large: int) -> list[dict[str, Any]]:
    """Chats of an image each. large: the number of the one whose image is a progressive JPEG of SIDE x SIDE pixels."""
    random = np.random.default_rng(0)
    chats = []
    for number in range(count):
        width, height = random.integers(60, 200, 2).tolist()
        image = plain_jpeg() if number == large else picture(width, height, seed=number)
        answer = f"The answer is {number}, no more " * (number % 5 + 1)
        chats.append(stored(("user", ["What do you see? ", ("image", image)]), ("assistant", answer)))
    return chats


def cut_short(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Half of the image is there, as of a download that broke off."""
    media: bytes = chat["media"]
    return _with_image(chat, media[: len(media) // 2])


def no_image(chat: Mapping[str, Any]) -> dict[str, Any]:
    """In the place of the image is the page of a server that did not have it."""
    page = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"
    return {**chat, "media": page.ljust(len(chat["media"]))}


def flipped(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Some bits of the image's pixels are others than they were."""
    media = bytearray(chat["media"])
    middle = len(media) // 2
    media[middle : middle + 40] = bytes(each ^ 0xA5 for each in media[middle : middle + 40])
    return {**chat, "media": bytes(media)}


def longer(chat: Mapping[str, Any]) -> dict[str, Any]:
    """The answer says more than it did."""
    return {**chat, "messages": chat["messages"].replace("no more", "no more, or perhaps a few more", 1)}


def endless(chat: Mapping[str, Any]) -> dict[str, Any]:
    """The image has the same header, and NUM_SCANS scans that change nothing: 14 bytes, and work of milliseconds each.

    It is a known way to keep a decoder of progressive JPEGs busy; all of its scans are valid.
    """
    media = plain_jpeg()
    scan = _last_scan(media)
    return _with_image(chat, media[:-2] + scan * NUM_SCANS + media[-2:])


def _with_image(chat: Mapping[str, Any], image: bytes) -> dict[str, Any]:
    """The chat with another image, whose facts are said to be those of the first."""
    messages = json.loads(chat["messages"])
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image":
                part["span"] = [0, len(image)]
    return {**chat, "messages": json.dumps(messages), "media": image}


def plain_jpeg() -> bytes:
    buffer = BytesIO()
    Image.new("L", (SIDE, SIDE), 128).save(buffer, "JPEG", progressive=True)
    return buffer.getvalue()


def _last_scan(jpeg: bytes) -> bytes:
    """From the last marker of a scan to the end of the image."""
    at, scan = 2, 0
    while jpeg[at + 1] != 0xD9:
        marker, (size,) = jpeg[at + 1], struct.unpack(">H", jpeg[at + 2 : at + 4])
        if marker == 0xDA:
            scan = at
        at += 2 + size
        while marker == 0xDA and not (jpeg[at] == 0xFF and jpeg[at + 1] not in (0, *range(0xD0, 0xD8))):
            at += 1
    return jpeg[scan:at]


def write_chats(folder: Path, chats: Sequence[Mapping[str, Any]]) -> None:
    with MDSWriter(columns=COLUMNS, out=str(folder), hashes=["xxh3_64"]) as writer:
        for chat in chats:
            writer.write(dict(chat))
