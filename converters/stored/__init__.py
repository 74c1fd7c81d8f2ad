"""Existing datasets: their description, their content, their faults.

catalog         index.json, _lmms/dataset.json and lengths indexes of a dataset
row_counts      counts of rows left out, by reason, and of unread names in rows
verify          all problems of a dataset; verify_shards: problems of its shards
merge           several datasets -> one, in the folder above them
appending       shards of a new part -> the index of the grown dataset
sample_view     a sample for people: messages, media, answers, the text that is trained on
"""
