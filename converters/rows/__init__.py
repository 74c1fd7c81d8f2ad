"""Row -> sample: what the user's columns hold, as what is stored.

kinds       the kinds of rows that are known, and which of them a row is
mapper      the first rows of a source -> what maps all of them
fields      which column of a row plays which role
chat        rows of chats -> turns
content     content of turns -> text and media parts
tokens      rows that are tokenized, and samples that are tokenized while they are converted
columns     columns that are kept as they are
"""
