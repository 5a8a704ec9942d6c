"""Dense matrix product of 8-bit floats."""
