"""Experiments: one file each, made to be copied."""
