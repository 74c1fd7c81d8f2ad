"""Existing datasets: their description, their content, their faults.

catalog         index.json, _lmms/dataset.json and lengths indexes of a dataset
row_counts      counts of rows left out, by reason, and of names in rows that nothing reads
verify          all problems of a dataset; verify_shards: of its shards
merge           several datasets -> one, in the folder above them
appending       shards of a new part -> the index of the dataset that it is appended to
sample_view     a sample as a person sees it: messages, media, answers, the text that is trained on
"""
