"""Nodes of a cluster as network namespaces of one machine: each with an address, a link of its own and its own caches.

namespaces      the nodes, their links and the switch between them; bucket: makes that of their store
machines        nodes with names and disks of their own; upload: puts a folder into their store
ray_cluster     a Ray cluster over the nodes
case            a run on a cluster, as it is simulated and as it is done
reading         a rank that reads a case; lock_step: what holds ranks together
truth           a case done by real loaders: what they downloaded, and how long they took
test_truth      it is what was foretold
test_namespaces links are as fast as they say, and can be cut; nothing is left of them
test_training   nodes train together, die, and come back
"""
