"""FSDP2SFTTrainer: the arguments and members of transformers' Trainer and TRL's SFTTrainer, over our trainer.

trainer         FSDP2SFTTrainer: its arguments -> a PackedTrainer; members of transformers' Trainer for scripts
fields          fields of transformers.TrainingArguments and TRL's configs, and the effect of each
table           all fields: refused, warned of; docs/arguments.md
arguments       TrainingArguments -> TrainConfig
tokenizer       processing_class, its end-of-text token and chat template
rows            rows of a datasets.Dataset -> input_ids and labels, like in TRL
answer_rows     rows with answers to compare, and rows with images
stored          a stored dataset -> datasets.IterableDataset, or a dataset of the hub with a card
conversion      a datasets.Dataset -> shards and lengths, once, by one rank
models          a model's name -> ModelConfig
data            the datasets of a run, converted or opened
collators       their data collators -> ours
packs           transformers' own Trainer on the packs of a PackedLoader
resolve         all arguments of a trainer -> the inputs of a run
"""
