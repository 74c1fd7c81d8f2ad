"""A stored dataset -> its content, for people. Nothing of it is executed.

command     the command; console: its tables and bars
summary     columns, sizes, lengths; samples to show, and their source rows
page        the HTML page
"""
