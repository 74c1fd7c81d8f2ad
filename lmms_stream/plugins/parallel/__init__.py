"""A model on several ranks that share its matrices, its experts or the tokens of a pack: if a degree is above 1.

tensor_parallel  parts of matrices, by transformers' plan, and what their ranks send each other
expert_parallel  experts of each rank, by transformers' plan; tokens to them and back
sequence    the part of a pack's tokens that a rank runs; attention of all tokens
exchanges   what ranks send each other of a tensor, and of its gradient
"""
