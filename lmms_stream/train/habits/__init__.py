"""Arguments of transformers' Trainer and TRL's SFTTrainer -> settings of a run. Imported only when they are given.

given           arguments of a trainer, and what a run needs
fields          fields of transformers.TrainingArguments, and what becomes of each; sft_fields: of TRL's
                SFTConfig; preference_fields: of DPOConfig and KTOConfig
table           all fields: refused, warned of; docs/arguments.md
arguments       TrainingArguments -> TrainConfig
tokenizer       processing_class, its end-of-text token and chat template
rows            rows of a datasets.Dataset -> input_ids and labels, as TRL makes them
answer_rows     rows with answers to compare, and rows with images
conversion      a datasets.Dataset -> shards and lengths, once, by one rank
models          a model's name -> ModelConfig
opened          a DatasetConfig -> its dataset
data            the datasets of a run, converted or opened
collators       their data collators -> ours
launch_file     LMMS Engine's launch file -> arguments of a trainer, key by key
resolve         all arguments of a trainer -> all that a run needs
"""
