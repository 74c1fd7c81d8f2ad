"""A stored dataset -> what people see. Nothing of it is executed.

summary     columns, sizes, lengths; samples to show, and their source rows
sample      a sample: messages, media, answers, the text that is trained on
visible     text with visible control characters
page        the HTML page
"""
