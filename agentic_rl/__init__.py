"""Reinforcement learning of tool-using language-model agents in JAX."""
