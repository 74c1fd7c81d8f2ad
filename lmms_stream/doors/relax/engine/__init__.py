"""What of Relax's engine is about prompts."""
