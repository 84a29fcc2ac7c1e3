"""Checkpoints: all or nothing, checksummed, for any number of ranks."""
