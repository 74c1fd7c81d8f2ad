"""Relax's settings of media."""
