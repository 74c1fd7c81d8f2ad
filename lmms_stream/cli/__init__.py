"""The command line: commands, tables and figures.

main                    `lmms-stream`, its commands for plans and training
convert, datasets       commands that convert, and for datasets that are there
console, console_datasets       tables and progress bars
plan_report             what plans amount to
run_plot                the logs of runs, drawn; figure: files of figures
"""
