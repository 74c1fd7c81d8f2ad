"""Nodes that take shards from each other instead of from the store. datasets -> caches with peers.

client      files from the caches of other nodes
server      the process of a node that gives files, and knows who has which
nodes       how nodes find each other: join_peers, meet_peers
"""
