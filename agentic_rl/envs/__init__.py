"""Environments: where agents act. To add one, copy `forkme.py`."""

from agentic_rl.envs.forkme import GuessEnvironment
from agentic_rl.envs.protocol import Environment
from agentic_rl.envs.protocol import EnvironmentFailure
from agentic_rl.envs.swe import SweEnvironment

ENVIRONMENTS: dict[str, type] = {
    'swe': SweEnvironment,
    'forkme': GuessEnvironment,
}

__all__ = [
    'ENVIRONMENTS',
    'Environment',
    'EnvironmentFailure',
    'GuessEnvironment',
    'SweEnvironment',
]
