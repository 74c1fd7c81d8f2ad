"""Executors of a conversion other than processes of this machine.

ray_cluster     workers on a Ray cluster
"""
