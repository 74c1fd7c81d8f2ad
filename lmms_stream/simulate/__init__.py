"""What a cluster will do with a plan: bytes, requests, waiting, memory and cost, from indexes and lengths alone.

cluster     nodes, links, caches and prices
sources     the datasets of a run -> plans and shards
needs       mixture + step config -> the shards that each node reads in each step
replay      needs + caches -> downloads; kernels: its compiled loops, and those of links
memory      what a loader worker keeps
measured    downloads -> figures
run         simulate(): datasets + cluster -> figures
compare     the same run with other settings, and advice
page        figures -> an HTML page
"""
