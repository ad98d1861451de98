"""System calls that code in a sandbox is refused, as a filter for the kernel (x86_64; elsewhere there is none).

The namespaces do the containing. The filter takes away what they do not cover: kinds of sockets that know no network
namespace (vsock reaches the host of a virtual machine), memory and objects that no limit counts, and the parts of the
kernel through which sandboxes have been left before.
"""

from __future__ import annotations

import errno
import platform
import struct

_ARCHITECTURE = 0xC000003E
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
_NAMESPACES = 0x7E020000
"""Flags of clone that make a namespace."""

_SOCKETS = (1, 2, 10, 16)  # unix, inet, inet6, netlink: those that know network namespaces
_SOCKET, _CLONE, _CLONE3 = 41, 56, 435

REFUSED = {
    "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "pivot_root": 155, "chroot": 161,
    "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "unshare": 272, "vmsplice": 278, "perf_event_open": 298, "fanotify_init": 300,
    "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip


def _statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def program() -> bytes:
    """The filter, as `seccomp(2)` takes it; empty where there is none for the machine.

    A refused call fails with EPERM; clone3, whose flags no filter can see, with ENOSYS, and libraries then use clone.
    """
    if platform.machine() != "x86_64":
        return b""
    refuse = _statement(_RETURN, _REFUSE | errno.EPERM)
    lines = [
        _statement(_LOAD, _ARCHITECTURE_AT),
        _statement(_EQUAL, _ARCHITECTURE, 1, 0),
        refuse,
        _statement(_LOAD, _NUMBER_AT),
        _statement(_AT_LEAST, _X32, 0, 1),
        refuse,
    ]
    for number in REFUSED.values():
        lines += [_statement(_EQUAL, number, 0, 1), refuse]
    lines += [
        _statement(_EQUAL, _CLONE3, 0, 1),
        _statement(_RETURN, _REFUSE | errno.ENOSYS),
        _statement(_EQUAL, _CLONE, 0, 3),
        _statement(_LOAD, _ARGUMENT_AT),
        _statement(_ANY_BIT, _NAMESPACES, 0, 1),
        refuse,
        _statement(_LOAD, _NUMBER_AT),
        _statement(_EQUAL, _SOCKET, 0, len(_SOCKETS) + 2),
        _statement(_LOAD, _ARGUMENT_AT),
        *(_statement(_EQUAL, family, len(_SOCKETS) - at, 0) for at, family in enumerate(_SOCKETS)),
        refuse,
        _statement(_RETURN, _ALLOW),
    ]
    return b"".join(lines)
