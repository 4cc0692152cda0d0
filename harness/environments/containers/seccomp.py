"""System calls that a container of ours may make: those that an interpreter and numerical libraries need, and no other.

An engine's own profile is made for whatever people run. Docker's leaves more than that, on older engines sockets of
AF_VSOCK (a way to a hypervisor past "no network") and io_uring among it. Here everything is refused that is not named:
with EPERM, or, where a library asks and then does without, with ENOSYS. What is left out on purpose: io_uring, bpf,
perf_event_open, ptrace and process_vm, keyctl, userfaultfd, mounts and namespaces, modules, kexec, clocks and the
host's name, quotas, swap, and every call of another architecture than the machine's own.
"""

from __future__ import annotations

import json

EPERM, ENOSYS = 1, 38
NEW_NAMESPACES = 0x7E020000
"""Flags of clone that make a namespace."""
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
"""Families of sockets that are allowed. There is no network but the loopback, and libraries ask netlink for its
addresses."""

FILES = """
    access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2
    fadvise64 fadvise64_64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync
    fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate
    ftruncate64 futimesat getcwd getdents getdents64 getxattr inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch ioctl lchown lchown32 lgetxattr link linkat listxattr llistxattr lremovexattr lseek _llseek
    lsetxattr lstat lstat64 mkdir mkdirat mknod mknodat newfstatat open openat openat2 pread64 preadv preadv2 pwrite64
    pwritev pwritev2 read readahead readlink readlinkat readv removexattr rename renameat renameat2 rmdir sendfile
    sendfile64 setxattr splice stat stat64 statfs statfs64 statx symlink symlinkat sync sync_file_range syncfs tee
    truncate truncate64 umask unlink unlinkat utime utimensat utimensat_time64 utimes vmsplice write writev
"""
MEMORY = """
    brk get_mempolicy madvise mbind membarrier memfd_create mincore mlock mlock2 mlockall mmap mmap2 mprotect mremap
    msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages set_mempolicy
    set_mempolicy_home_node shmat shmctl shmdt shmget
"""
PROCESSES = """
    alarm arch_prctl capget capset execve execveat exit exit_group fork getcpu getegid getegid32 geteuid geteuid32
    getgid getgid32 getgroups getgroups32 getitimer getpgid getpgrp getpid getppid getpriority getresgid getresgid32
    getresuid getresuid32 getrlimit get_robust_list getrusage getsid gettid getuid getuid32 ioprio_get ioprio_set
    kill nanosleep pause pidfd_open pidfd_send_signal prctl prlimit64 restart_syscall rseq rt_sigaction rt_sigpending
    rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64
    rt_tgsigqueueinfo sched_getaffinity sched_getattr sched_getparam sched_get_priority_max sched_get_priority_min
    sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr
    sched_setparam sched_setscheduler sched_yield setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups
    setgroups32 setitimer setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32
    setreuid setreuid32 setrlimit set_robust_list setsid set_thread_area set_tid_address setuid setuid32 sigaltstack
    sysinfo tgkill times tkill ugetrlimit uname vfork wait4 waitid waitpid
"""
WAITING = """
    clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep clock_nanosleep_time64
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd
    eventfd2 futex futex_time64 futex_waitv getrandom gettimeofday io_cancel io_destroy io_getevents io_setup
    io_submit mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe
    pipe2 poll ppoll ppoll_time64 pselect6 pselect6_time64 _newselect select semctl semget semop semtimedop
    semtimedop_time64 signalfd signalfd4 time timer_create timer_delete timer_getoverrun timer_gettime
    timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
    timerfd_settime64
"""
SOCKETS = """
    accept accept4 bind connect getpeername getsockname getsockopt listen recv recvfrom recvmmsg recvmmsg_time64
    recvmsg send sendmmsg sendmsg sendto setsockopt shutdown socketpair
"""


def profile() -> str:
    """Return the profile as JSON, as an engine takes it."""
    names = sorted({name for family in (FILES, MEMORY, PROCESSES, WAITING, SOCKETS) for name in family.split()})
    allowed = [
        {"names": names, "action": "SCMP_ACT_ALLOW"},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [_masked(0, NEW_NAMESPACES, 0)]},
        # glibc falls back to clone, whose flags can be looked at.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
        {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [_equal(0, 0)]},
        {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [_equal(0, 0xFFFFFFFF)]},
        *(
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [_equal(0, number)]}
            for number in FAMILIES.values()
        ),
        {"names": ["io_uring_setup"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
    ]
    architectures = [{"architecture": f"SCMP_ARCH_{name}", "subArchitectures": []} for name in ("X86_64", "AARCH64")]
    return json.dumps(
        {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": EPERM, "archMap": architectures, "syscalls": allowed},
        separators=(",", ":"),
    )


def _equal(index: int, value: int) -> dict[str, int | str]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


def _masked(index: int, mask: int, value: int) -> dict[str, int | str]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
