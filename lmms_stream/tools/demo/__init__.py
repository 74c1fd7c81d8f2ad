"""`make demo`: the whole path on this machine.

material    data and models of a demo: text or vision
corpus      chats from the standard library, and a tokenizer trained on them
pictures    charts, pictures and videos with questions about them
tiny_vlm    a processor and a model for them
endpoint    an S3 endpoint
jobs        training jobs: watched, killed, resumed; whether resumed runs equal the uninterrupted run
run         the demo
command     `lmms-stream demo`
"""
