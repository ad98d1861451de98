"""Attempts to get out of a sandbox, by name: which tool is used, what for, and what may come of it.

An attempt that succeeds prints ESCAPED. Braces are filled in by the test: a secret's path and folder, ports and sockets
that listen on the host, the id of a process there, the home, the repository and Python's own folder, a file name. Where
an attempt takes several steps, the last one's outcome counts. One that should succeed after all does no harm.
"""

SYSCALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def connects(family, address, kind="SOCK_STREAM"):
    return (
        f"import socket\ns = socket.socket(socket.{family}, socket.{kind})\ns.settimeout(1)\n"
        f"s.connect({address})\nprint('ESCAPED')"
    )


def opens(path, mode="r"):
    return f"file = open({path}, {mode!r})\nfile.read(100)\nprint('ESCAPED')"


def writes(path, text="x"):
    return f"file = open({path}, 'w')\nfile.write({text!r})\nfile.flush()\nprint('ESCAPED')"


def calls(expression):
    """A call of the C library that must not return 0 or more."""
    return f"{SYSCALL}got = {expression}\nassert got < 0, 'ESCAPED'\nraise OSError(ctypes.get_errno(), 'refused')"


def syscall(number, *arguments):
    return calls(f"libc.syscall({', '.join(map(str, (number, *arguments)))})")


def answers(text):
    """Writes to whatever is open besides input and output."""
    return f"import os\nfor fd in range(3, 20):\n  try: os.write(fd, {text})\n  except OSError: pass"


NETWORK = {
    "tcp-to-the-host": ("python", connects("AF_INET", "('127.0.0.1', {port})")),
    "tcp-to-the-host-over-ipv6": ("python", connects("AF_INET6", "('::1', {port})")),
    "tcp-to-the-internet": ("python", connects("AF_INET", "('1.1.1.1', 53)")),
    "udp-to-the-internet": ("python", connects("AF_INET", "('1.1.1.1', 53)", "SOCK_DGRAM")),
    "name-lookup": ("python", "import socket\nprint('ESCAPED', socket.getaddrinfo('example.com', 80))"),
    "http": ("python", "from urllib import request\nprint('ESCAPED', request.urlopen('http://1.1.1.1', timeout=1))"),
    "bash-dev-tcp": ("shell", "exec 5<>/dev/tcp/127.0.0.1/{port} && echo ESCAPED"),
    "raw-socket": ("python", "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nprint('ESCAPED')"),
    "packet-socket": ("python", "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('ESCAPED')"),
    "vsock-to-the-machine-outside": ("python", connects("AF_VSOCK", "(2, 1024)")),
    "unix-socket-of-the-host": ("python", connects("AF_UNIX", "{socket!r}")),
    "abstract-socket-of-the-host": ("python", connects("AF_UNIX", "'\\0{abstract}'")),
    "container-daemon": ("python", connects("AF_UNIX", "'/var/run/docker.sock'")),
    "io-uring": ("python", syscall(425, 8, "ctypes.create_string_buffer(256)")),
    "loopback-down": (
        "python",
        "import fcntl, socket, struct\ns = socket.socket()\n"
        "fcntl.ioctl(s, 0x8914, struct.pack('16sH14x', b'lo', 0))\nprint('ESCAPED')",
    ),
}

READING = {
    "password-file": ("python", opens("'/etc/shadow'")),
    "a-file-of-the-host": ("python", opens("{secret!r}")),
    "a-file-of-the-host-by-shell": ("shell", "cat {secret}"),
    "the-home": ("python", "import os\nassert set(os.listdir({home!r})) - set({prefix!r}.split('/')), 'nothing there'"),
    "the-repository": ("python", opens("{repository!r} + '/pyproject.toml'")),
    "root-of-the-first-process": ("python", opens("'/proc/1/root' + {secret!r}")),
    "memory-of-the-first-process": ("python", opens("'/proc/1/mem'", "rb")),
    "descriptors-of-the-first-process": (
        "python",
        "import os\nfor fd in (0, 1, 2): open(f'/proc/1/fd/{{fd}}', 'w')\nprint('ESCAPED')",
    ),
    "environments-of-all-processes": (
        "shell",
        "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep {token}",
    ),
    "own-environment": ("python", "import os\nassert '{backwards}'[::-1] in str(dict(os.environ)), 'nothing there'"),
    "kernel-memory": ("python", opens("'/proc/kcore'", "rb")),
    "device-memory": ("python", opens("'/dev/mem'", "rb")),
    "kernel-log": ("python", syscall(103, 3, "ctypes.create_string_buffer(4096)", 4096)),
    "disk-by-device-node": ("python", "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))"),
    "file-by-handle": ("python", syscall(304, -100, "ctypes.create_string_buffer(64)", 0)),
    "sys-tree": ("python", "import os\nprint('ESCAPED', os.listdir('/sys'))"),
    "run-tree": ("python", "import os\nprint('ESCAPED', os.listdir('/run'))"),
    "descriptors-left-open": (
        "python",
        "import os\nfor fd in range(3, 256):\n  try: found = os.pread(fd, 100, 0)\n  except OSError: continue\n"
        "  print('ESCAPED', found)\nraise OSError('nothing there')",
    ),
    "key-ring": ("python", syscall(250, 11, -3, "ctypes.create_string_buffer(64)", 64)),
}

WRITING = {
    "the-root-folder": ("python", writes("'/{mark}'")),
    "programs": ("shell", "echo x >/usr/bin/{mark} && echo ESCAPED"),
    "settings": ("python", writes("'/etc/{mark}'")),
    "python-itself": ("python", writes("{prefix!r} + '/lib/{mark}'")),
    "devices": ("python", writes("'/dev/{mark}'")),
    "a-folder-of-the-host": ("python", writes("{folder!r} + '/{mark}'")),
    "settings-of-the-kernel": (
        "python",
        "path = '/proc/sys/kernel/core_pattern'\nheld = open(path).read()\nfile = open(path, 'w')\n"
        "file.write(held)\nfile.flush()\nprint('ESCAPED')",
    ),
    "sysrq": ("python", writes("'/proc/sysrq-trigger'", "h")),
    "mode-of-a-device": ("python", "import os\nos.chmod('/dev/null', 0o666)\nprint('ESCAPED')"),
    "times-of-a-program": ("python", "import os\nos.utime('/bin/bash')\nprint('ESCAPED')"),
    "the-first-process-s-oom-score": ("python", writes("'/proc/1/oom_score_adj'", "0")),
    "mount": ("python", calls("libc.mount(b'none', b'/workspace', b'tmpfs', 0, None)")),
    "bind-mount": ("python", calls("libc.mount(b'/usr', b'/workspace', None, 4096, None)")),
    "remount-writable": ("python", calls("libc.mount(None, b'/usr', None, 32 | 4096, None)")),
    "unmount": ("python", calls("libc.umount2(b'/usr', 2)")),
    "owner-of-a-file": ("python", "import os\nopen('f', 'w')\nos.chown('f', 0, 0)\nprint('ESCAPED')"),
    "edit-above-the-workspace": ("edit", {"command": "create", "path": "../../{mark}", "text": "x"}),
    "edit-an-absolute-path": ("edit", {"command": "view", "path": "/etc/passwd"}),
    "edit-a-neighbour-of-like-name": ("edit", {"command": "create", "path": "/workspace2/{mark}", "text": "x"}),
    "edit-a-path-with-a-nul": ("edit", {"command": "view", "path": "a\0b"}),
    "edit-through-a-linked-folder": (
        ("shell", "ln -s /tmp out"),
        ("edit", {"command": "create", "path": "out/{mark}", "text": "x"}),
    ),
    "edit-through-a-linked-file": (
        ("shell", "ln -s /proc/self/environ out"),
        ("edit", {"command": "view", "path": "out"}),
    ),
    "edit-the-channel-to-the-host": (
        ("shell", "ln -s /proc/1/fd/1 out"),
        ("edit", {"command": "create", "path": "out", "text": "x"}),
    ),
    "edit-a-pipe": (("shell", "mkfifo pipe"), ("edit", {"command": "view", "path": "pipe"})),
}

RIGHTS = {
    "kill-a-process-of-the-host": ("python", "import os\nos.kill({pid}, 9)\nprint('ESCAPED')"),
    "kill-everything": ("python", "import os\nos.kill(-1, 9)"),
    "trace-the-first-process": ("python", syscall(101, 16, 1, 0, 0)),
    "limits-of-the-first-process": (
        "python",
        "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64))\nprint('ESCAPED')",
    ),
    "priority-of-the-first-process": ("python", "import os\nos.setpriority(os.PRIO_PROCESS, 1, 5)\nprint('ESCAPED')"),
    "priority-of-every-process": ("python", "import os\nos.setpriority(os.PRIO_USER, 0, 5)\nprint('ESCAPED')"),
    "cores-of-the-first-process": (
        "python",
        "import os\nos.sched_setaffinity(1, list(os.sched_getaffinity(0))[:1])\nprint('ESCAPED')",
    ),
    "scheduling-of-the-first-process": (
        "python",
        "import os\nos.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))\nprint('ESCAPED')",
    ),
    "scheduling-parameters-of-the-first-process": ("python", syscall(142, 1, "ctypes.byref(ctypes.c_int(0))")),
    "scheduling-attributes-of-the-first-process": (
        "python",
        syscall(314, 1, "ctypes.byref((ctypes.c_uint32 * 12)(48, 0))", 0),
    ),
    "disk-priority-of-the-first-process": ("python", syscall(251, 1, 1, 3 << 13)),
    "slots-of-asynchronous-input": ("python", syscall(206, 64, "ctypes.byref(ctypes.c_ulong())")),
    "watches-of-files": ("python", syscall(294, 0)),
    "others-off-a-core": ("python", syscall(157, 62, 1, 0, 0, 0)),
    "a-call-of-a-newer-kernel": ("python", syscall(467, -100, "b'.'", 1, 0, 0)),
    "memory-of-another-process": ("python", syscall(310, 1, 0, 0, 0, 0, 0)),
    "namespace-of-its-own": ("python", syscall(272, 0x10000000)),
    "namespace-by-clone": ("python", syscall(56, 0x10000011, 0, 0, 0, 0)),
    "namespace-by-program": ("shell", "unshare --user --map-root-user id && echo ESCAPED"),
    "namespace-of-the-first-process": ("python", syscall(308, "os.open('/proc/self/ns/net', 0)", 0)),
    "become-root": ("python", "import os\nos.setuid(0)\nprint('ESCAPED')"),
    "become-a-group": ("python", "import os\nos.setgroups([0])\nprint('ESCAPED')"),
    "become-root-by-program": ("shell", "su -c 'echo ESCAPED' </dev/null || sudo -n echo ESCAPED"),
    "become-root-by-a-set-uid-file": (
        "shell",
        "cp /bin/bash b && chmod 4755 b && ./b -p -c '[ $(id -u) = 0 ] && echo ESCAPED'",
    ),
    "change-the-root-folder": ("python", "import os\nos.chroot('/workspace')\nprint('ESCAPED')"),
    "host-name": ("python", "import socket\nsocket.sethostname('{mark}')\nprint('ESCAPED')"),
    "reboot": ("python", calls("libc.reboot(0)")),
    "kernel-module": ("python", syscall(175, 0, 0, 0)),
    "kernel-program": ("python", syscall(321, 5, "ctypes.create_string_buffer(128)", 128)),
    "clock": ("python", "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.time())\nprint('ESCAPED')"),
    "higher-limits": (
        "python",
        "import resource as r\nr.setrlimit(r.RLIMIT_FSIZE, (r.RLIM_INFINITY, r.RLIM_INFINITY))\nprint('ESCAPED')",
    ),
    "higher-priority": ("python", "import os\nos.nice(-5)\nprint('ESCAPED')"),
    "terminal": ("python", writes("'/dev/tty'")),
}

SPENDING = {
    "fork-bomb": ("python", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"),
    "fork-bomb-of-the-shell": ("shell", "b() {{ b | b & }}; b; sleep 5"),
    "thread-bomb": (
        "python",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ),
    "memory-bomb": ("python", "held = []\nwhile True: held.append(bytearray(10_000_000))"),
    "memory-bomb-of-many": (
        "python",
        "import os, time\nfor _ in range(6):\n  if os.fork() == 0: break\n"
        "held = bytearray(b'x') * 60_000_000\ntime.sleep(60)",
    ),
    "memory-in-files-without-a-name": ("python", "import os\nos.memfd_create('x')\nprint('ESCAPED')"),
    "memory-in-segments": ("python", syscall(29, 0, 1_000_000, 0o1600)),
    "large-memory-that-is-shared": ("python", "import mmap\nmmap.mmap(-1, 2**21)\nprint('ESCAPED')"),
    "fill-the-workspace": ("python", "for i in range(100): open(str(i), 'wb').write(bytes(2**20))"),
    "fill-the-temporary-folder": ("python", "for i in range(100): open(f'/tmp/{{i}}', 'wb').write(bytes(2**20))"),
    "fill-the-shared-memory": ("python", "for i in range(100): open(f'/dev/shm/{{i}}', 'wb').write(bytes(2**20))"),
    "too-large-a-file": ("python", "open('big', 'wb').write(bytes(2**23))"),
    "too-large-a-hole": ("python", "open('big', 'wb').truncate(2**40)"),
    "too-many-files": ("python", "for i in range(10**7): open(str(i), 'w').close()"),
    "too-many-descriptors": ("python", "import os\nwhile True: os.dup(1)"),
    "spin": ("python", "while True: pass"),
    "spin-in-many": ("shell", "for i in 1 2 3 4; do (while :; do :; done) & done; wait"),
    "sleep": ("python", "import time\ntime.sleep(60)"),
    "endless-output": ("python", "while True: print('x' * 1000)"),
    "endless-output-of-a-child": ("shell", "yes & sleep 60"),
    "deaf-to-signals": ("shell", "trap '' TERM INT HUP QUIT; while :; do sleep 60; done"),
}

LINGERING = {
    "a-daemon": (
        "python",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(60)\n  os._exit(0)",
    ),
    "a-job-in-the-background": ("shell", "(sleep 60; echo ESCAPED) & disown"),
    "a-job-that-starts-itself-again": ("shell", "f() {{ sleep 0.01; f & }}; f & sleep 0.05"),
    "a-thread-that-spins": (
        "python",
        "import threading\ndef spin():\n  while True: pass\nthreading.Thread(target=spin, daemon=True).start()",
    ),
}

BREAKING = {
    "kill-the-interpreter": ("python", "import os\nos.kill(os.getpid(), 9)"),
    "stop-the-interpreter": ("python", "import os\nos.kill(os.getpid(), 19)"),
    "end-the-interpreter": ("python", "import os\nos._exit(0)"),
    "crash-the-interpreter": ("python", "import ctypes\nctypes.string_at(0)"),
    "replace-the-interpreter": ("python", "import os\nos.execv('/bin/true', ['true'])"),
    "end-the-shell": ("shell", "exit 0"),
    "replace-the-shell": ("shell", "exec true"),
    "signal-the-first-process": (
        "python",
        "import os\nfor number in (1, 2, 9, 15, 19): os.kill(1, number)\nraise OSError('as it should be')",
    ),
    "close-every-descriptor": ("python", "import os\nos.closerange(0, 256)"),
    "forge-a-long-answer": ("python", answers("b'0' * 100")),
    "forge-a-short-answer": ("python", answers(r"b'0\0'")),
    "forge-an-answer-of-no-number": ("python", answers(r"b'\xff\xfe 0\0'")),
    "forge-a-frame": ("python", answers(r"b'\0\0\0\2\0\0\0\0{{}}'")),
    "forge-the-right-answer-and-go-on": (
        (
            "python",
            "import os, sys, time\nf = sys._getframe()\nwhile 'nonce' not in f.f_locals: f = f.f_back\n"
            "os.write(f.f_locals['channel'].fileno(), b'%d 0\\0' % f.f_locals['nonce'])\ntime.sleep(0.5)",
        ),
        ("python", "print('this answer is the one before')"),
    ),
}
