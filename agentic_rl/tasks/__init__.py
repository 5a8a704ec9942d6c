"""Task sets: generate, load, version, sample."""
