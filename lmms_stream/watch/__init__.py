"""The log of a run as it grows -> what people see of it, in a terminal and on a page. Nothing of the run is changed.

source      what the user names -> the log of a run, its checkpoints, its datasets
tail        the lines of a log that are new
panels      records -> curves, with as many points as a page can draw
run         a run, as it stands: its state, its figures, its curves, its alerts
samples     one sample of a dataset as a page
terminal    runs as text
server      runs as a page on 127.0.0.1; page.html is the page
"""
