"""A small system-call filter, a second wall inside the sandbox.

Refuses with EPERM what tests of Python code never need: memory that resource
limits do not count (System V and anonymous shared memory), other processes'
memory, keys, mounts, namespaces, kernel modules, io_uring, BPF, and sockets of
families that have no namespace, as those to a virtual machine's host. The first
wall is the namespaces; on a machine type that is not listed there is no filter.
"""

from __future__ import annotations

import functools
import os
import platform
import struct

_ALLOW = 0x7FFF0000
_EPERM = 0x00050001
_KILL = 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH = 0, 4
_OFFSET_FIRST_ARGUMENT = 16  # its low half, on little-endian machines
_X32_BIT = 0x40000000

# UNIX, INET, INET6, NETLINK: each network namespace has its own.
_FAMILIES = (1, 2, 10, 16)
_SOCKETS = {'x86_64': (41, 53), 'aarch64': (198, 199)}  # socket, socketpair

# Numbers that are the same on every machine type.
_REFUSED_EVERYWHERE = (
    *(425, 426, 427),  # io_uring_setup, _enter, _register
    *(428, 429, 430, 432, 442),  # open_tree, move_mount, fsopen, fsmount, ...
    *(438, 447),  # pidfd_getfd, memfd_secret
)
_MACHINES = {
    'x86_64': (
        0xC000003E,
        (
            *(29, 30, 64, 68, 240, 319),  # shm*, semget, msgget, mq_open, memfd
            *(101, 310, 311),  # ptrace, process_vm_readv, process_vm_writev
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(298, 321, 323),  # perf_event_open, bpf, userfaultfd
            *(155, 161, 165, 166),  # pivot_root, chroot, mount, umount2
            *(272, 304, 308),  # unshare, open_by_handle_at, setns
            *(175, 176, 246, 313),  # modules, kexec_load
        ),
    ),
    'aarch64': (
        0xC00000B7,
        (
            *(194, 196, 190, 186, 180, 279),
            *(117, 270, 271),
            *(217, 218, 219),
            *(241, 280, 282),
            *(41, 51, 40, 39),
            *(97, 265, 268),
            *(105, 106, 104, 273),
        ),
    ),
}


@functools.cache
def program() -> bytes | None:
  """Returns the filter as classic BPF, or None on an unlisted machine."""
  if platform.machine() not in _MACHINES:
    return None
  arch, refused = _MACHINES[platform.machine()]
  code = [
      (_LOAD, 0, 0, _OFFSET_ARCH),
      (_JUMP_EQUAL, 1, 0, arch),
      (_RETURN, 0, 0, _KILL),
      (_LOAD, 0, 0, _OFFSET_NUMBER),
  ]
  if platform.machine() == 'x86_64':
    code += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
  for number in (*refused, *_REFUSED_EVERYWHERE):
    code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
  families = [(_LOAD, 0, 0, _OFFSET_FIRST_ARGUMENT)]
  for family in _FAMILIES:
    families += [(_JUMP_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
  families.append((_RETURN, 0, 0, _EPERM))
  for number in _SOCKETS[platform.machine()]:
    code += [(_JUMP_EQUAL, 0, len(families), number), *families]
  code.append((_RETURN, 0, 0, _ALLOW))
  return b''.join(struct.pack('=HBBI', *line) for line in code)


def open_filter() -> int | None:
  """Returns a descriptor from which bubblewrap reads the filter, once."""
  data = program()
  if data is None:
    return None
  fd = os.memfd_create('filter')
  os.write(fd, data)
  os.lseek(fd, 0, os.SEEK_SET)
  return fd
