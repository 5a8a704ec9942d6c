"""Meshes, sharding rules, several hosts, planning by compilation."""
