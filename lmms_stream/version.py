"""The version of this package, for its metadata (pyproject.toml), its files and its command."""

VERSION = "0.1.0"
