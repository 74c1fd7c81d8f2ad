"""Relax's utilities that its data needs."""
