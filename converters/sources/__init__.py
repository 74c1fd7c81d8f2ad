"""What the user names -> units of rows, each read by one process.

specs           what is typed -> what it names: slices, globs, members
settings        what a list says of one of its sources beside where it lies
lists           YAML lists -> specs with settings; dataset_info: LLaMA-Factory's dataset_info.json -> the same
listing         which files of a folder are data
configurations  which of them are of one configuration of a dataset; splits: which of one split
formats         the formats of files, a line each
detect          what a file holds, by its name and its first bytes
sources         what specs name, opened; opener: what one spec names
python_rows     rows that a program holds: its iterables, and datasets of the library `datasets`
files           files that rows lie in, on this machine or in a store
table_source    a source whose rows are a table, fetched and opened when its turn comes
table           what all formats share: where the rows lie, rows that units carry
hive            folders that are called lang=en -> a column of the rows below them
units           what a source is cut into; by_index: rows of a unit, of which only those that are asked for are parsed
pieces          row groups and record batches -> units
slices          slices of large row groups and record batches
delimited       what is said of CSV and TSV -> how they are written
jsonl, text_lines, json_array, csv, arrow, webdataset, folders, saved_datasets, hub, mds    a format each
stored_rows     samples of a stored dataset -> the rows that give them again
arrow_values    values of Arrow columns as their types and features mean them
compression     files as streams of plain bytes
"""
