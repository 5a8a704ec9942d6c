"""Block selection."""
