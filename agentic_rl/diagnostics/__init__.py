"""Measurements of a run: mismatch, throughput, depth, sparsity, credit."""
