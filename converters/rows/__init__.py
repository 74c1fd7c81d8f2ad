"""Row -> sample: what the user's columns hold, as what is stored.

schemas         what is stored of samples
options         what is asked about rows
user_functions  the user's own: which rows are taken, and what is made of each
mapper          the first rows of a source -> what maps all of them
kinds           the kinds of rows that are known, in the order in which they are looked for
beside          columns without which those that are read would mean something else
nearest         columns that fit no kind -> the kind that they are nearest to
row_kind        what a kind is: detection, columns, reading
media_columns   columns that hold media by their values, whatever they are called
late_columns    columns that hold nothing in the first rows, and something in a later one
fields          which column of a row plays which role
chat            what all kinds of chats share: turns -> stored messages; answers: a chat for each answer of one
content         content of turns -> text and media parts
tokens, messages, exchanges, alpaca, prompts, dialog, text, image_label, image, columns     a kind or a family a file
speakers        messages whose keys and speakers have names of their own -> the tags that say so
tags            messages whose keys and speakers have names of their own -> OpenAI's
llama_factory   rows as LLaMA-Factory's dataset_info.json describes them -> rows of a kind
preferences     rows whose answers are not all good, as chats; preference_kinds: as answers that are compared
whole_texts     pairs of texts that begin alike with what they answer
kept_columns    columns that are kept as they are
tokenize        samples -> tokens samples, where they are tokenized while they are converted
"""
