"""What `make demo` runs: the whole path on this machine.

corpus      chats from the standard library, and a tokenizer trained on them
endpoint    an S3 endpoint
jobs        training jobs that are watched, killed and resumed
compare     whether resumed runs are the uninterrupted one
run         all of it
command     `lmms-stream demo`
"""
