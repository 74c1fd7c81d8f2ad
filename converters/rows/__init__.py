"""Row -> sample: the user's columns -> stored columns.

schemas         stored columns of samples
options         settings of rows
user_functions  functions of the user: filter takes rows, map changes rows
mapper          the first rows of a source -> the reading of all its rows; the reading of stored samples
kinds           known kinds of rows, in the order of their detection; kinds of texts and images
row_kind        parts of a kind: detection, columns, reading; choices of the user
column_names    names of columns -> roles: questions, answers, contexts, choices, thoughts, facts
side_columns    columns that change the meaning of the columns that are read
nearest         rows that are not read as they are -> options that read them, proved
vendors         forms of vendors and data sets -> usual columns and messages
fields          the role of each column
chat            parts that all kinds of chats share: turns -> stored messages
content         content of turns -> text and media parts
references      references to media -> bytes of images, audio and video, and facts about them
chat_kinds, tokens      kinds of chats, kinds of tokens
speakers        unusual keys and speakers of messages -> tags; tagged messages -> messages
preference_kinds    rows of answers to compare, read for preferences or chats
kept_columns    columns that are kept unchanged
"""
