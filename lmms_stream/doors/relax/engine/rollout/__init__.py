"""Relax's data sources, and what its rollout functions give."""
