"""Rollouts: engine, paged KV cache, scheduler, collection."""
