"""Families of models that read media: what they share, Qwen-VL, and families that the installed processor describes.

files       a processor's folder or hub id -> its settings, as they are written there
settings    what a user may choose of how media are read
family      what a family tells: counts from facts, positions, the tower's tensors
registry    a processor's folder, or a model's type -> its family; other families are in plugins/families
vision      images and chosen frames of videos -> patches; settings of towers of square tiles
clips       sounds -> mel features
qwen_vl     Qwen2-VL, and the code that it shares with qwen2_5_vl and qwen3_vl
installed   transformers' processor of a folder, and families whose media only it reads
probe       a processor of any family -> its kinds of media, learned by running it
"""
