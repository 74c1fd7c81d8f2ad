"""The command line: commands, tables and figures.

main            `lmms-stream COMMAND`; command: what every command is made with; output: its standard output
processor       which processor a command reads samples with
convert         the command that converts; repeated: its options of several values
datasets        commands for datasets that are there
plan            what plans amount to; plan_report: its figures
runs            commands for training runs; run_plot: their logs, drawn
watch           the command that shows runs while they train
unload          the command that writes datasets as files of rows
profile         which part of a run is its limit
console, console_datasets       tables and progress bars
figure          files of figures
"""
