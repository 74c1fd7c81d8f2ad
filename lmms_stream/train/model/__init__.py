"""A transformers model -> what each rank runs on packs.

attention   which implementations of attention to try; varlen: each sample by itself; torch_varlen: by torch's kernel;
            block_attention: among blocks of texts and images; ulysses: of tokens that lie on several ranks
loss        a loss of each target token; router: that of a mixture of experts
head        gradients of what makes the logits, some at a time; hidden: hidden states of models without a part for them
sequence    the part of a pack's tokens that a rank runs
exchanges   what ranks send each other of a tensor, and of its gradient
adapters    what is trained of a model with an adapter
build       how a model is built; diffusion: one of diffusers; own_class: one of the user's own class
model       how it is run on packs; towers: its parts that read media; plain: one that is no language model
isolation   the proof that it keeps the samples of a pack apart, by proof_samples; choice: the attention that passes it;
            trial: how long a step takes with it; own_loop: both for a loop of the user's own
sharing     has it run on parts of the tokens of packs
sharding    what each rank holds; weights: how it gets there; pretrained: read one by one; unused: gradients of what a
            rank does not use
tensor_parallel  parts of matrices, by transformers' plan; cuts: what their ranks send each other
expert_parallel  experts of each rank, by transformers' plan; dispatch: how tokens get to them and back
accumulation  when gradients of micro-batches are summed over ranks
flops       how much arithmetic its training takes; products: of matrices of parts that read media, of which media_flops
            takes the formula: tower_flops of patches, tile_flops of tiles, sound_flops of clips; image_flops: of models
            that make images
"""
