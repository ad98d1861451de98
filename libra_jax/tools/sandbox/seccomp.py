"""A kernel filter of the system calls that code in a sandbox may make. x86_64 only; other machines get no filter.

The namespaces contain the code. The filter covers what namespaces do not: sockets without a network namespace (vsock
reaches the host of a virtual machine), memory and kernel objects that no limit counts, and calls that change another
process's limits or priority. It also refuses calls that ordinary programs do not need. A call that a newer kernel adds
is refused until it is listed here. The list is the default of Docker and podman, less what this docstring names.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

from libra_jax.tools.sandbox import usage

_ARCHITECTURE = 0xC000003E
_X32 = 0x40000000
_LOAD, _AND, _EQUAL, _MORE, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_NAMESPACES = 0x7E020000
"""Flags of clone that make a namespace."""

_SOCKETS = (1, 2, 10, 16)  # unix, inet, inet6, netlink: the families that respect network namespaces
_PERSONALITIES = (0, 0x40000, 0xFFFFFFFF)  # Linux, Linux without random addresses, and the query of the current one
_CORE_SCHEDULING = 62  # the option of prctl that keeps other processes off a core
_MMAP, _SETSOCKOPT, _CLONE, _FCNTL, _PRCTL, _FADVISE, _CLONE3 = 9, 54, 56, 72, 157, 221, 435
_PIPE_SIZE = 1031  # the command of fcntl that makes a pipe hold more than `usage.PIPE_BYTES`
_NOT_NEEDED = 4  # the advice that drops pages of a file from the cache of the whole machine

ALLOWED = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35,
    "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "connect": 42, "accept": 43,
    "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "bind": 49, "listen": 50,
    "getsockname": 51, "getpeername": 52, "getsockopt": 55, "fork": 57, "vfork": 58, "execve": 59,
    "exit": 60, "wait4": 61, "kill": 62, "uname": 63, "flock": 73, "fsync": 74, "fdatasync": 75,
    "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83,
    "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91,
    "chown": 92, "fchown": 93, "lchown": 94, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98,
    "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "setuid": 105, "setgid": 106, "geteuid": 107,
    "getegid": 108, "setpgid": 109, "getppid": 110, "getpgrp": 111, "setsid": 112, "setreuid": 113, "setregid": 114,
    "getgroups": 115, "setgroups": 116, "setresuid": 117, "getresuid": 118, "setresgid": 119, "getresgid": 120,
    "getpgid": 121, "setfsuid": 122, "setfsgid": 123, "getsid": 124, "capget": 125, "capset": 126, "rt_sigpending": 127,
    "rt_sigtimedwait": 128, "rt_sigqueueinfo": 129, "rt_sigsuspend": 130, "sigaltstack": 131, "utime": 132,
    "mknod": 133, "statfs": 137, "fstatfs": 138, "getpriority": 140, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "sched_rr_get_interval": 148, "mlock": 149,
    "munlock": 150, "mlockall": 151, "munlockall": 152, "arch_prctl": 158, "setrlimit": 160, "gettid": 186,
    "readahead": 187, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "getxattr": 191, "lgetxattr": 192,
    "fgetxattr": 193, "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "tkill": 200, "time": 201, "futex": 202, "sched_getaffinity": 204, "epoll_create": 213,
    "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "timer_create": 222,
    "timer_settime": 223, "timer_gettime": 224, "timer_getoverrun": 225, "timer_delete": 226, "clock_gettime": 228,
    "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234,
    "utimes": 235, "waitid": 247, "ioprio_get": 252, "openat": 257, "mkdirat": 258, "mknodat": 259, "fchownat": 260,
    "futimesat": 261, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
    "readlinkat": 267, "fchmodat": 268, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "get_robust_list": 274, "splice": 275, "tee": 276, "sync_file_range": 277, "utimensat": 280, "epoll_pwait": 281,
    "signalfd": 282, "timerfd_create": 283, "eventfd": 284, "fallocate": 285, "timerfd_settime": 286,
    "timerfd_gettime": 287, "accept4": 288, "signalfd4": 289, "eventfd2": 290, "epoll_create1": 291, "dup3": 292,
    "pipe2": 293, "preadv": 295, "pwritev": 296, "rt_tgsigqueueinfo": 297, "recvmmsg": 299, "name_to_handle_at": 303,
    "sendmmsg": 307, "getcpu": 309, "sched_getattr": 315, "renameat2": 316, "seccomp": 317, "getrandom": 318,
    "execveat": 322, "membarrier": 324, "mlock2": 325, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328,
    "pkey_mprotect": 329, "pkey_alloc": 330, "pkey_free": 331, "statx": 332, "rseq": 334, "pidfd_send_signal": 424,
    "pidfd_open": 434, "close_range": 436, "openat2": 437, "faccessat2": 439, "epoll_pwait2": 441,
    "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446, "futex_waitv": 449,
    "fchmodat2": 452, "map_shadow_stack": 453, "futex_wake": 454, "futex_wait": 455,
    "futex_requeue": 456, "mseal": 462, "setxattrat": 463, "getxattrat": 464, "listxattrat": 465, "removexattrat": 466,
}  # fmt: skip
"""Numbers of the calls that are allowed with any arguments."""

ONLY_WITH: dict[str, tuple[int, Sequence[tuple[int, Sequence[int]]]]] = {
    "socket": (41, [(0, _SOCKETS)]),
    "socketpair": (53, [(0, _SOCKETS)]),
    "personality": (135, [(0, _PERSONALITIES)]),
    "setpriority": (141, [(0, [0]), (1, [0])]),
    "sched_setparam": (142, [(0, [0])]),
    "sched_setscheduler": (144, [(0, [0])]),
    "sched_setaffinity": (203, [(0, [0])]),
    "ioprio_set": (251, [(0, [1]), (1, [0])]),
    "prlimit64": (302, [(0, [0])]),
    "sched_setattr": (314, [(0, [0])]),
}
"""Calls that are allowed if each listed argument has one of the listed values. Process id 0 means the caller itself.

The filter compares the lower 32 bits only. The kernel also reads only these bits of each of these arguments.
"""

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
"""Calls that fail with EPERM. All other calls that are not allowed fail with ENOSYS, as on an older kernel."""


def _statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


_YES = _statement(_RETURN, _ALLOW)


def _no(number: int) -> bytes:
    return _statement(_RETURN, _REFUSE | number)


def _argument(index: int, *, upper: bool = False) -> bytes:
    """Returns the statement that loads one half (32 bits) of an argument."""
    return _statement(_LOAD, _ARGUMENTS_AT + 8 * index + 4 * upper)


def _special() -> dict[int, list[bytes]]:
    """Returns the rules of the calls that are decided by their arguments, by call number."""
    rules: dict[int, list[bytes]] = {}
    for number, conditions in ONLY_WITH.values():
        lines = []
        for index, values in conditions:
            lines.append(_argument(index))
            # A match jumps over the remaining values and the refusal; the last mismatch falls into the refusal.
            lines += [_statement(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
            lines.append(_no(errno.EPERM))
        rules[number] = [*lines, _YES]
    # Refuses large shared memory without a file. /proc shows how much of such memory is mapped, not how much is held: a
    # process may unmap all but one page.
    anonymous, kind, shared = 0x20, 0x0F, 0x01
    rules[_MMAP] = [
        _argument(3),
        _statement(_ANY_BIT, anonymous, 1, 0),
        _YES,
        _statement(_AND, kind),
        _statement(_EQUAL, shared, 1, 0),
        _YES,
        _argument(1, upper=True),
        _statement(_EQUAL, 0, 1, 0),
        _no(errno.ENOMEM),
        _argument(1),
        _statement(_MORE, usage.SHARED_BYTES, 0, 1),
        _no(errno.ENOMEM),
        _YES,
    ]
    rules[_CLONE] = [_argument(0), _statement(_ANY_BIT, _NAMESPACES, 0, 1), _no(errno.EPERM), _YES]
    rules[_PRCTL] = [_argument(0), _statement(_EQUAL, _CORE_SCHEDULING, 0, 1), _no(errno.EPERM), _YES]
    socket_level, send_buffer, receive_buffer, done = 1, 7, 8, 0
    rules[_SETSOCKOPT] = [
        _argument(1),
        _statement(_EQUAL, socket_level, 1, 0),
        _YES,
        _argument(2),
        _statement(_EQUAL, send_buffer, 1, 0),
        _statement(_EQUAL, receive_buffer, 0, 1),
        # Pretends to succeed: a socket's buffers count as memory, and the kernel also reduces sizes silently.
        _no(done),
        _YES,
    ]
    rules[_FCNTL] = [_argument(1), _statement(_EQUAL, _PIPE_SIZE, 0, 1), _no(errno.EPERM), _YES]
    # Pretends to succeed, because programs give the advice after a copy. Files of the host share that cache.
    rules[_FADVISE] = [_argument(3), _statement(_EQUAL, _NOT_NEEDED, 0, 1), _no(done), _YES]
    # A filter cannot read its flags, which lie in memory; libraries fall back to clone.
    rules[_CLONE3] = [_no(errno.ENOSYS)]
    return rules


def program() -> bytes:
    """Returns the filter in the form that `seccomp(2)` takes. Empty if the machine has none."""
    if platform.machine() != "x86_64":
        return b""
    lines = [
        # The numbers below are those of x86_64. With another architecture they would mean other calls.
        _statement(_LOAD, _ARCHITECTURE_AT),
        _statement(_EQUAL, _ARCHITECTURE, 1, 0),
        _no(errno.EPERM),
        _statement(_LOAD, _NUMBER_AT),
        # Calls of the x32 interface have the same architecture, and other numbers.
        _statement(_AT_LEAST, _X32, 0, 1),
        _no(errno.EPERM),
    ]
    for number, rule in _special().items():
        # A mismatch jumps over the rule. A jump has one byte, so no rule may grow beyond 255 statements.
        lines += [_statement(_EQUAL, number, 0, len(rule)), *rule]
    ranges: list[tuple[int, int]] = []  # ends included; ranges make the filter shorter than single numbers do
    for number in sorted(ALLOWED.values()):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    for first, last in ranges:
        lines += [_statement(_MORE, last, 2, 0), _statement(_AT_LEAST, first, 0, 1), _YES]
    for number in REFUSED.values():
        lines += [_statement(_EQUAL, number, 0, 1), _no(errno.EPERM)]
    return b"".join([*lines, _no(errno.ENOSYS)])
