"""The command line: the commands of the core, tables and figures. Other commands are in tools/.

main            `lmms-stream COMMAND`; command: what every command is made with, options for a processor; output: its
                standard output
convert         the command that converts; repeated: its options of several values
datasets        commands for existing datasets, and the one that writes a dataset as files of rows
runs            commands for training runs; plots: figures of their logs, and files of figures
console, console_datasets       tables and progress bars
"""
