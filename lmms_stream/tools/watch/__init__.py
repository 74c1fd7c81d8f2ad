"""The log of a run as it grows -> what people see in a terminal and on a page. Nothing of the run is changed.

source      what the user names -> the log of a run, its new lines, its checkpoints, its datasets
run         the state of a run: figures, curves with as many points as a page can draw, alerts
terminal    runs as text
server      runs as a page on 127.0.0.1, with samples; page.html is the page
"""
