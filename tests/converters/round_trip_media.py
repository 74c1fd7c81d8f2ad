"""Rows with media, as bytes, base64, URLs of data and paths, and beside each what must come back.

Media of `wanted` stand as their bytes: {"type": "image", "mime": "image/png", "data": b"…"} and the facts about them.
"""

from __future__ import annotations

from base64 import b64encode

from .media_files import CLIP, CLIP_FACTS, CLIP_SOUND_OF_VIDEO, image_bytes, wav_bytes
from .round_trip_cases import CSV, HELLO, IMAGES, JSON, TABLES, TAR, Case, chats, says, text

PNG, JPEG, GIF = image_bytes("PNG", color=7), image_bytes("JPEG", size=(17, 5)), image_bytes("GIF", color=900)
WAV = wav_bytes(num_samples=64, value=5)
FILES = {  # below the media root
    "pics/été 1.png": PNG, "pics/deep/er/2.jpeg": JPEG, "anim.gif": GIF, "speech/a.wav": WAV, "clips/a b.mp4": CLIP,
    "cat/1.png": PNG, "cat/2.jpeg": JPEG, "dog & co/ü.png": image_bytes("PNG", color=99),
}  # fmt: skip
IMAGE = {"type": "image", "mime": "image/png", "data": PNG, "width": 4, "height": 3}
PHOTO = {"type": "image", "mime": "image/jpeg", "data": JPEG, "width": 17, "height": 5}
MOVING = {"type": "image", "mime": "image/gif", "data": GIF, "width": 4, "height": 3}
SOUND = {"type": "audio", "mime": "audio/wav", "data": WAV, "samples": 64, "rate": 16000}
VIDEO = {"type": "video", "mime": "video/mp4", "data": CLIP, **CLIP_FACTS, **CLIP_SOUND_OF_VIDEO}

SEEN = [text("what is "), IMAGE, text(" and\n"), PHOTO, text("?")]


def base64(data: bytes) -> str:
    return b64encode(data).decode()


URL_PARTS = [
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64(PNG)}"}},
    {"type": "input_audio", "input_audio": {"data": base64(WAV), "format": "wav"}},
    {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64(CLIP)}"}},
]
PATH_PARTS = [
    {"type": "image", "image": "pics/été 1.png"}, {"type": "image", "path": "anim.gif"},
    {"type": "audio", "path": "speech/a.wav"}, {"type": "video", "path": "clips/a b.mp4"},
]  # fmt: skip
ANSWER = says("assistant", [text("héllo 🐾")])

MEDIA_CASES = [
    Case(
        name="parts-of-data",
        rows=chats([says("user", [text("a"), *URL_PARTS, text("b")]), ANSWER], [says("user", URL_PARTS[:1]), ANSWER]),
        wanted=chats(
            [says("user", [text("a"), IMAGE, SOUND, VIDEO, text("b")]), ANSWER], [says("user", [IMAGE]), ANSWER]
        ),
    ),
    Case(
        name="parts-of-base64",
        rows=chats(
            [
                says("user", [{"type": "image", "base64": base64(JPEG)}, {"type": "audio", "base64": base64(WAV)}]),
                ANSWER,
            ]
        )
        * 2,
        wanted=chats([says("user", [PHOTO, SOUND]), ANSWER]) * 2,
    ),
    Case(
        name="parts-of-paths",
        rows=chats([says("user", [*PATH_PARTS, text("?")]), ANSWER, says("user", PATH_PARTS[:1]), ANSWER]) * 2,
        wanted=chats([says("user", [IMAGE, MOVING, SOUND, VIDEO, text("?")]), ANSWER, says("user", [IMAGE]), ANSWER])
        * 2,
    ),
    Case(
        name="parts-of-bytes",
        rows=chats(
            [
                says(
                    "user",
                    [
                        {"type": "image", "bytes": PNG},
                        {"type": "audio", "bytes": WAV},
                        {"type": "video", "bytes": CLIP},
                    ],
                ),
                ANSWER,
            ]
        )
        * 2,
        wanted=chats([says("user", [IMAGE, SOUND, VIDEO]), ANSWER]) * 2,
        carried_by=(TABLES,),
    ),
    Case(
        name="slots-and-lists-of-paths",
        rows=[
            {
                "messages": [says("user", "what is <image> and\n<image>?"), HELLO[1]],
                "images": ["pics/été 1.png", "pics/deep/er/2.jpeg"],
            },
            {"messages": HELLO, "images": []},
        ],
        wanted=chats([says("user", SEEN), HELLO[1]], HELLO),
    ),
    Case(
        name="slots-and-lists-of-bytes",
        rows=[
            {
                "messages": [says("user", "what is <image> and\n<image>?"), HELLO[1]],
                "images": [{"bytes": PNG, "path": None}, {"bytes": JPEG, "path": "2.jpeg"}],
                "audios": None,
            },
            {"messages": [says("user", "<audio>"), HELLO[1]], "images": [], "audios": [{"bytes": WAV, "path": None}]},
        ],
        wanted=chats([says("user", SEEN), HELLO[1]], [says("user", [SOUND]), HELLO[1]]),
        carried_by=(TABLES,),
    ),
    Case(
        name="sharegpt-with-all-media",
        rows=[
            {
                "conversations": [
                    {"from": "human", "value": "<video>\nwhat, <audio> or <image>?"},
                    {"from": "gpt", "value": "<image> 🎬"},
                ],
                "images": ["anim.gif", f"data:image/png;base64,{base64(PNG)}"],
                "audios": ["speech/a.wav"],
                "videos": ["clips/a b.mp4"],
            }
        ]
        * 2,
        wanted=chats(
            [
                says("user", [VIDEO, text("\nwhat, "), SOUND, text(" or "), MOVING, text("?")]),
                says("assistant", [IMAGE, text(" 🎬")]),
            ]
        )
        * 2,
    ),
    Case(
        name="question-about-a-path",
        rows=[
            {"question": "which?", "answer": "a", "image": "anim.gif"},
            {"question": "", "answer": "b", "image": "cat/1.png"},
        ],
        wanted=chats(
            [says("user", [MOVING, text("which?")]), says("assistant", "a")],
            [says("user", [IMAGE]), says("assistant", "b")],
        ),
    ),
    Case(
        name="alpaca-with-base64",
        rows=[{"instruction": "describe\n<image>", "input": "", "output": "a cat", "images": [base64(JPEG)]}] * 2,
        wanted=chats([says("user", [text("describe\n"), PHOTO]), says("assistant", "a cat")]) * 2,
    ),
    Case(
        name="question-about-bytes",
        rows=[{"question": "which?", "answer": "a", "image": PNG}, {"question": "what?", "answer": "b", "image": JPEG}],
        wanted=chats(
            [says("user", [IMAGE, text("which?")]), says("assistant", "a")],
            [says("user", [PHOTO, text("what?")]), says("assistant", "b")],
        ),
        carried_by=(TABLES, TAR),
    ),
    Case(
        name="image-and-label",
        rows=[
            {"image": path, "label": path.partition("/")[0]} for path in ("cat/1.png", "cat/2.jpeg", "dog & co/ü.png")
        ],
        wanted=[
            {"image": PNG, "label": "cat"},
            {"image": JPEG, "label": "cat"},
            {"image": FILES["dog & co/ü.png"], "label": "dog & co"},
        ],
        carried_by=(JSON, TABLES, CSV, TAR, IMAGES),
    ),
    Case(
        name="image-bytes-and-label",
        rows=[
            {"image": {"bytes": PNG, "path": "a.png"}, "label": 3},
            {"image": {"bytes": JPEG, "path": None}, "label": 0},
        ],
        wanted=[{"image": PNG, "label": "3"}, {"image": JPEG, "label": "0"}],
        carried_by=(TABLES,),
    ),
    Case(
        name="kept-bytes",
        rows=[
            {"text": "a", "thumb": {"bytes": PNG, "path": None}, "raw": b"\0\xff"},
            {"text": "b", "thumb": {"bytes": JPEG, "path": None}, "raw": b"x"},
        ],
        wanted=[{"text": "a", "thumb": PNG, "raw": b"\0\xff"}, {"text": "b", "thumb": JPEG, "raw": b"x"}],
        carried_by=(TABLES,),
        options={"keep": True},
    ),
]
