"""LMMS Engine's modules with its names, below this package: `lmms_engine.train` is `lmms_stream.lmms_engine.train`.

mapping_func    tables of datasets, processors and models; register_dataset, register_processor
datasets/       DatasetConfig and the datasets, processors and collators, by all their names
train           the trainer, its arguments, and TrainRunner
launch/         launch files: file (its keys -> arguments), run (its trainer), and
launch/cli      create_train_task, and the command `python -m lmms_stream.lmms_engine.launch.cli config_yaml=FILE`
"""
