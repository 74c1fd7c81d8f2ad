"""`make demo`: the whole path on this machine.

corpus      chats from the standard library, and a tokenizer trained on them
vision      charts, pictures and videos with questions about them, a processor and a model
endpoint    an S3 endpoint
jobs        training jobs: watched, killed, resumed; whether resumed runs equal the uninterrupted run
run         the demo; its data and models: text or vision
command     `lmms-stream demo`
"""
