"""A stored dataset -> what people see of it. Nothing of it is executed.

summary     columns, sizes, lengths, and which samples are shown
seen        what a model sees of media
origin      samples <-> the rows that they were made of
sample      a sample: its messages, media, and the text that is trained on
visible     text that shows itself, control characters too
page        all that as one HTML page
"""
