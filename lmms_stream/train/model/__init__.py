"""A transformers model -> the part of each rank, run on packs.

attention   implementations of attention to try; our own attention within each sample of a pack
loss        hidden states -> loss of each target token, a few logits at a time; loss of a router of experts
adapters    trained part of a model with an adapter
build       model of transformers, of diffusers, or of the user's own class; slow_fast: LLaVA-OneVision with slow frames
model       forward passes on packs; towers: parts of a model for media
isolation   proof that a model keeps the samples of a pack apart; choice: the fastest attention to pass
            the proof, for a trainer and for a user's own training loop; verdict: kept for later starts
by_sample   runs of layers on each sample alone; carried_state: search for layers that carry state between samples
sharding    part of each rank, and weights from rank 0; gradients of unused parameters; time of the sum of
            micro-batches' gradients over ranks; pretrained: weights, read tensor by tensor
flops       arithmetic of training, also of models for images; media_flops: arithmetic of media towers
"""
