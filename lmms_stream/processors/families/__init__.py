"""Families of models that read media: shared code, Qwen-VL, and families described by the installed processor.

files       a processor's folder or hub id -> its settings, unchanged
settings    the user's settings for reading media
family      interface of a family: counts from facts, positions, the tower's tensors
registry    a processor's folder, or a model's type -> its family; other families are in plugins/families
vision      images and chosen frames of videos -> patches; settings of towers of square tiles
clips       sounds -> mel features
qwen_vl     Qwen2-VL, and the code shared with qwen2_5_vl and qwen3_vl
installed   transformers' processor of a folder, and families whose media only this processor reads
probe       a processor of any family -> its kinds of media, discovered by running it
"""
