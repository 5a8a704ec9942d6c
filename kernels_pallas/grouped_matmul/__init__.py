"""Mixture-of-experts product."""
