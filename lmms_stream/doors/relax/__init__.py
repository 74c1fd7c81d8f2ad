"""Relax's modules by their names below this package: `relax.utils.types` is `lmms_stream.relax.utils.types`.

utils/data              the datasets, their readers, a row's way to a sample
utils/types             Sample
utils/misc              load_function
utils/multimodal        limits on media
engine/rollout          the data sources, what a rollout function gives
refused                 how names that are not here are refused
"""
