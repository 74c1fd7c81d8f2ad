"""What users of transformers' Trainer and TRL's SFTTrainer give -> what a run needs. Imported only when it is given.

given           what a trainer was given, and what a run needs
row             a field of their arguments and what becomes of it
fields          the rows of transformers.TrainingArguments; sft_fields: those that TRL's SFTConfig adds, with defaults;
                preference_fields: those of DPOConfig and KTOConfig
table           all rows: what is refused, what is warned of, and docs/arguments.md
arguments       their arguments -> TrainConfig
tokenizer       processing_class, its end-of-text token and chat template
rows            rows of a datasets.Dataset -> input_ids and labels, as TRL makes them
answer_rows     rows with answers to compare -> the same, as DPO and KTO need them; media_rows: rows with images
conversion      a datasets.Dataset -> shards and lengths, once, by one rank
models          a model's name -> ModelConfig
opened          a DatasetConfig -> its dataset
data            the datasets of a run, converted or opened
collators       their data collators -> ours
launch_keys     the keys of LMMS Engine's launch file beyond transformers', and what becomes of each
launch_models   models of LMMS Engine's own classes in it -> ours, and their tasks
launch_file     LMMS Engine's launch file -> what a trainer is given
resolve         all that a trainer was given -> all that a run needs
"""
