"""A model on several ranks that share its matrices, its experts or the tokens of a pack, for degrees above 1.

tensor_parallel  parts of matrices, by transformers' plan, and communication of their ranks
expert_parallel  experts of each rank, by transformers' plan; tokens to them and back
sequence    the part of a pack's tokens that a rank runs; attention of all tokens
exchanges   communication of a tensor, and of its gradient
"""
