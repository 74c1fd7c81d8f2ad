"""What `make demo` runs: the whole path on this machine.

material    what a demo trains on, and what: made by text or vision
corpus      chats from the standard library, and a tokenizer trained on them
charts, pictures, videos   media with questions about them
tiny_vlm    a processor and a model that read them
endpoint    an S3 endpoint
jobs        training jobs that are watched, killed and resumed
compare     whether resumed runs are the uninterrupted one
run         all of it
command     `lmms-stream demo`
"""
