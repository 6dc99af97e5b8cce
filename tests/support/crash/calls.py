"""Which system calls a crash test counts: all except those listed here, which change nothing outside the
process.

Source: seccomp(2); linux/bpf.h; syscalls(2).
"""

from __future__ import annotations

import functools
import os
import platform
import re
import struct
import subprocess


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


HARMLESS = frozenset(
    _words("""
    read readv pread64 preadv preadv2 recvfrom recvmsg recvmmsg getdents64 lseek close close_range
    stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getcwd
    getxattr lgetxattr fgetxattr chdir fchdir umask dup dup2 dup3 fcntl flock pipe pipe2 fadvise64
    poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd2
    timerfd_create timerfd_settime inotify_init1 inotify_add_watch inotify_rm_watch signalfd4 perf_event_open
    socket socketpair connect listen accept accept4 shutdown getsockname getpeername getsockopt setsockopt
    mmap munmap mremap mprotect madvise brk mlock munlock membarrier memfd_create
    futex futex_waitv set_robust_list get_robust_list rseq set_tid_address arch_prctl prctl prlimit64
    setrlimit getrlimit getrusage clone clone3 fork vfork execve execveat exit exit_group
    wait4 waitid restart_syscall rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait rt_sigsuspend
    sigaltstack setitimer alarm
    getpid gettid getppid getpgrp getpgid getsid setsid getuid geteuid getgid getegid getgroups getresuid
    getresgid capget pidfd_open uname sysinfo times time gettimeofday clock_gettime clock_getres
    clock_nanosleep nanosleep sched_yield sched_getaffinity sched_setaffinity sched_getparam
    sched_getscheduler getcpu getrandom getpriority
    """)
)
"""The effect of these calls ends with the process. A listening socket is a file from its bind(2) on, which
counts.
"""

BPF_COMMANDS = _words("""
    MAP_CREATE MAP_LOOKUP_ELEM MAP_UPDATE_ELEM MAP_DELETE_ELEM MAP_GET_NEXT_KEY PROG_LOAD OBJ_PIN OBJ_GET
    PROG_ATTACH PROG_DETACH PROG_TEST_RUN PROG_GET_NEXT_ID MAP_GET_NEXT_ID PROG_GET_FD_BY_ID MAP_GET_FD_BY_ID
    OBJ_GET_INFO_BY_FD PROG_QUERY RAW_TRACEPOINT_OPEN BTF_LOAD BTF_GET_FD_BY_ID TASK_FD_QUERY
    MAP_LOOKUP_AND_DELETE_ELEM MAP_FREEZE BTF_GET_NEXT_ID MAP_LOOKUP_BATCH MAP_LOOKUP_AND_DELETE_BATCH
    MAP_UPDATE_BATCH MAP_DELETE_BATCH LINK_CREATE LINK_UPDATE LINK_GET_FD_BY_ID LINK_GET_NEXT_ID ENABLE_STATS
    ITER_CREATE LINK_DETACH PROG_BIND_MAP TOKEN_CREATE
    """)
"""In the kernel's order."""
BPF_READS = frozenset(
    _words("""
    MAP_LOOKUP_ELEM MAP_GET_NEXT_KEY OBJ_GET PROG_GET_NEXT_ID MAP_GET_NEXT_ID PROG_GET_FD_BY_ID
    MAP_GET_FD_BY_ID OBJ_GET_INFO_BY_FD PROG_QUERY BTF_GET_FD_BY_ID TASK_FD_QUERY BTF_GET_NEXT_ID
    MAP_LOOKUP_BATCH LINK_GET_FD_BY_ID LINK_GET_NEXT_ID
    """)
)
IOCTL_READS = {"TCGETS": 0x5401, "FIONREAD": 0x541B, "FIONBIO": 0x5421, "FIOCLEX": 0x5451}
CREATING = os.O_CREAT | os.O_TRUNC | (os.O_TMPFILE & ~os.O_DIRECTORY)
"""Flags of open(2) that create or truncate a file."""

_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_ALLOW, _NOTIFY, _KILL = 0x7FFF_0000, 0x7FC0_0000, 0x8000_0000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


@functools.cache
def names() -> dict[int, str]:
    """Return this machine's system calls by number."""
    command = ["gcc", "-E", "-dM", "-include", "sys/syscall.h", "-"]
    macros = subprocess.run(command, check=True, capture_output=True, text=True, input="").stdout
    found = re.findall(r"#define __NR_(\w+) (\d+)$", macros, re.MULTILINE)
    return {int(number): name for name, number in found}


def seccomp_filter() -> bytes:
    """Return a seccomp program that allows harmless calls and notifies a supervisor of all others."""
    numbers = {name: number for number, name in names().items()}
    steps = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[platform.machine()]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name in HARMLESS & numbers.keys():
        steps += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ALLOW)]
    reads = [BPF_COMMANDS.index(command) for command in sorted(BPF_READS)]
    steps += _unless(numbers["bpf"], 0, reads)
    steps += _unless(numbers["ioctl"], 1, list(IOCTL_READS.values()))
    for name, position in (("open", 1), ("openat", 2)):
        if name in numbers:
            steps += [
                (_EQUAL, 0, 4, numbers[name]),
                (_LOAD, 0, 0, _ARGUMENTS + 8 * position),
                (_ANY_BIT, 0, 1, CREATING),
                (_RETURN, 0, 0, _NOTIFY),
                (_RETURN, 0, 0, _ALLOW),
            ]
    steps.append((_RETURN, 0, 0, _NOTIFY))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _unless(number: int, position: int, values: list[int]) -> list[tuple[int, int, int, int]]:
    """Allow the call only with one of these values as that argument."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * position)]
    for value in values:
        body += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    body.append((_RETURN, 0, 0, _NOTIFY))
    return [(_EQUAL, 0, len(body), number), *body]
