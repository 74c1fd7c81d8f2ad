"""A stored dataset -> its content, for people. Nothing of it is executed.

command     the command
summary     columns, sizes, lengths; samples to show, and their source rows
page        an inspection in a terminal, as JSON, or as an HTML page
"""
