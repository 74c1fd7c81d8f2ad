"""Nodes that take shards from each other instead of from the store. datasets -> caches with peers.

client      files from the caches of other nodes
server      the process of a node that serves files, and knows which node has each file
nodes       how nodes find each other: join_peers, meet_peers
"""
