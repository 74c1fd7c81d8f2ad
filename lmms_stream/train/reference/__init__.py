"""What a model is compared with: the log-probabilities that its starting weights give to answers. packs -> [reference]

reference  what a reference is, and the digest of weights by which it is known again
frozen     the starting weights, kept beside those that are trained
stored     log-probabilities that were measured once, and the file that they lie in
"""
