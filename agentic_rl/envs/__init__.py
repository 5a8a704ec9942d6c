"""Environments: the protocol, one file per environment, the sandbox."""
