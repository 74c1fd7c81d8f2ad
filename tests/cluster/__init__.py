"""Nodes of a cluster as network namespaces of one machine: each with an address, a link of its own and its own caches.

namespaces      the nodes, their links and the switch between them
ray_cluster     a Ray cluster over the nodes
test_namespaces links are as fast as they say, and can be cut
"""
