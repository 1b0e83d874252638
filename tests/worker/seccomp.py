"""Real seccomp filters, for a child process to put itself under.

Source: seccomp(2), include/uapi/linux/seccomp.h and filter.h.
"""

from __future__ import annotations

import ctypes
import errno
import os

KILL_PROCESS = 0x80000000  # SECCOMP_RET_KILL_PROCESS
KILL_THREAD = 0x00000000  # SECCOMP_RET_KILL_THREAD
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_NUMBER_OFFSET, _ARGUMENTS_OFFSET = 0, 16  # struct seccomp_data
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2

NUMBERS = {
    "x86_64": {
        "get_mempolicy": 239,
        "migrate_pages": 256,
        "sched_setaffinity": 203,
        "set_mempolicy": 238,
    },
    "aarch64": {
        "get_mempolicy": 236,
        "migrate_pages": 238,
        "sched_setaffinity": 122,
        "set_mempolicy": 237,
    },
}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def number_of(call: str) -> int:
    """The call's number on this architecture."""
    return NUMBERS[os.uname().machine][call]


def fail_with(code: int = errno.EPERM) -> int:
    """The action that lets a call fail with an errno."""
    return _ERRNO | code


def filter_calls(action: int, *calls: str, first_argument: int | None = None) -> None:
    """Puts the calling thread under a filter; only calls with that first argument, if one is given."""
    for call in calls:
        steps = [(_LOAD_WORD, 0, 0, _NUMBER_OFFSET)]
        if first_argument is None:
            steps += [(_JUMP_IF_EQUAL, 0, 1, number_of(call))]
        else:
            steps += [
                (_JUMP_IF_EQUAL, 0, 3, number_of(call)),
                (
                    _LOAD_WORD,
                    0,
                    0,
                    _ARGUMENTS_OFFSET,
                ),  # the lower half: both machines are little-endian
                (_JUMP_IF_EQUAL, 0, 1, first_argument),
            ]
        steps += [(_RETURN, 0, 0, action), (_RETURN, 0, 0, _ALLOW)]
        instructions = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
        program = _Program(len(steps), instructions)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
            _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
        ):
            raise OSError(ctypes.get_errno(), "no seccomp filter can be set")
