"""The user's sources -> units of rows, each read by one process.

specs           typed text -> slices, globs, members; settings of one source of a list
lists           YAML lists -> specs with settings; LLaMA-Factory's, by its door
listing         data files of a folder; files of one configuration and one split
detect          formats of files, by name and first bytes
sources         specs -> opened sources
python_rows     rows of a program: iterables, and datasets of the library `datasets`
files           files of rows, local or in a store, read in streams of plain bytes
table           parts that all formats share: places of rows, random access, sources fetched at their turn
units           pieces of a source that one process reads
manifests       tables joined to rows; the known folders
jsonl, json_array, csv (and its settings), arrow, webdataset, hub (and saved datasets), mds     a format each
folders         folders of texts and images; folders named lang=en -> a column of the rows below them
arrow_values    values of Arrow columns, by type and feature
"""
