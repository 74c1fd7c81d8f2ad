"""The prompt-related part of Relax's engine."""
