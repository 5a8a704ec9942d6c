"""Row operations."""
