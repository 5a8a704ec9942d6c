"""Sandboxes: where the code of agents runs."""

from agentic_rl.envs.sandbox.bubblewrap import BubblewrapSandbox
from agentic_rl.envs.sandbox.bubblewrap import exposed
from agentic_rl.envs.sandbox.protocol import DEFAULT_BOUNDS
from agentic_rl.envs.sandbox.protocol import Bounds
from agentic_rl.envs.sandbox.protocol import ExecResult
from agentic_rl.envs.sandbox.protocol import Sandbox
from agentic_rl.envs.sandbox.subprocess import SubprocessSandbox
from agentic_rl.envs.sandbox.workspace import WorkspaceError

SANDBOXES: dict[str, type[Sandbox]] = {
    'bubblewrap': BubblewrapSandbox,
    'subprocess': SubprocessSandbox,
}

__all__ = [
    'Bounds',
    'BubblewrapSandbox',
    'DEFAULT_BOUNDS',
    'ExecResult',
    'SANDBOXES',
    'Sandbox',
    'SubprocessSandbox',
    'WorkspaceError',
    'exposed',
]
