"""Relax's data sources and the results of its rollout functions."""
