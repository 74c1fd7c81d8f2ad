"""A transformers model -> what each rank runs on packs.

attention   which implementations of attention to try; varlen: each sample by itself; torch_varlen: by torch's kernel;
            block_attention: among blocks of texts and images
loss        a loss of each target token; router: that of a mixture of experts
head        gradients of what makes the logits, some at a time
adapters    what is trained of a model with an adapter
build       how a model is built; diffusion: one of diffusers
model       how it is run on packs; towers: its parts that read media; plain: one that is no language model
isolation   the proof that it keeps the samples of a pack apart, by proof_samples; choice: the attention that passes it;
            trial: how long a step takes with it
sharding    what each rank holds; weights: how it gets there; unused: gradients of what a rank does not use
accumulation  when gradients of micro-batches are summed over ranks
flops       how much arithmetic its training takes; tower_flops: that of a part that reads media
"""
