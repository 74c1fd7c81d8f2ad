"""Datasets and processors -> faults of supervision, each with a count, a rule, a verdict and examples.

command     the command; the report in a terminal, in JSON, or in an HTML page
report      datasets -> the report, in worker processes
samples     a shard -> facts of the samples
repeats     hashes and sketches of samples -> equal and similar samples. Pure
texts       texts of a chat, and special tokens of a tokenizer
checks      the checks and their rules; counts per source -> findings. Pure
"""
