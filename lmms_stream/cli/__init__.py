"""The command line: the commands of the core, tables and figures. Other commands are in tools/.

main            `lmms-stream COMMAND`, and its standard output
command         parts of every command; options for a processor
convert         the command for conversions; convert_options: its options, also with several values
datasets        commands for existing datasets, also to write a dataset as files of rows
runs            commands for training runs; plots: figures of their logs, and files of figures
console, console_datasets       tables and progress bars
"""
