"""Datasets that are there: what they say of themselves, what they hold, whether it is true.

catalog         index.json, _lmms/dataset.json and lengths indexes of a dataset
unread          names in rows that nothing reads, and where they are
index           a lengths index for shards that are there
verify          all problems of a dataset
verify_shards   the problems of its shards
joining         several datasets -> what one of all their samples consists of
merge           that in the folder above them
growing         that in the place of the first of them, which grows so
inspect/        what it holds, for people to look at
"""
