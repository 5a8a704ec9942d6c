"""Log-prob head."""
