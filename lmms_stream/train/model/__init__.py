"""A transformers model -> what each rank runs on packs.

attention   implementations of attention to try; attention of each sample of a pack by itself
loss        hidden states -> a loss of each target token, a few logits at a time; the loss of a router of experts
adapters    what is trained of a model with an adapter
build       a model, built: of transformers, of diffusers, of the user's own class
model       how it is run on packs; towers: its parts that read media
isolation   the proof that it keeps the samples of a pack apart; choice: the fastest attention that passes
            it, for a trainer and for a training loop that users write
sharding    what each rank holds, and how it gets there; gradients of unused parameters;
            when gradients of micro-batches are summed over ranks; pretrained: weights, read one by one
flops       arithmetic of training, of models that make images too; media_flops: of parts that read media
"""
