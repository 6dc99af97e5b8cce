/* Counts every call of a process that changes something outside it, and kills the process at one of them.
 * For tests, by LD_PRELOAD. CRASH_CONTROL names a file of two u32, shared with the test: calls so far, and
 * the call before which to die (0: none). CRASH_LOG names a file that gets one line a call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile uint32_t *control;
static long (*kernel)(long, ...);

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("CRASH_CONTROL");

	kernel = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	int fd = path ? kernel(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
	void *page = fd < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (fd >= 0)
		kernel(SYS_close, fd);
	control = page == MAP_FAILED ? NULL : page;
}

static void note(const char *call, const char *what)
{
	char line[300];
	int kept = errno;

	if (!control)
		return;
	uint32_t number = __atomic_add_fetch(&control[0], 1, __ATOMIC_SEQ_CST);
	int length = snprintf(line, sizeof(line), "%u %s %.200s\n", number, call, what ? what : "");
	int fd = kernel(SYS_openat, AT_FDCWD, getenv("CRASH_LOG"), O_WRONLY | O_APPEND | O_CLOEXEC);

	if (fd >= 0) {
		kernel(SYS_write, fd, line, length);
		kernel(SYS_close, fd);
	}
	if (number == control[1])
		kernel(SYS_kill, getpid(), SIGKILL);
	errno = kept;
}

static int is_file(int fd)
{
	struct stat found;

	return fd > 2 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

static int is_told(int fd)
{
	int family = 0;
	socklen_t size = sizeof(family);

	return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 &&
	       (family == AF_NETLINK || family == AF_UNIX);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define PASS(type, name, parameters, when, what, arguments) \
	type name parameters                                 \
	{                                                    \
		if (when)                                    \
			note(#name, what);                   \
		return NEXT(name) arguments;                 \
	}

PASS(ssize_t, write, (int fd, const void *data, size_t size), is_file(fd), "", (fd, data, size))
PASS(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), is_file(fd), "", (fd, data, size, at))
PASS(ssize_t, writev, (int fd, const struct iovec *parts, int count), is_file(fd), "", (fd, parts, count))
PASS(ssize_t, send, (int fd, const void *data, size_t size, int flags), size > 1 && is_told(fd), "", (fd, data, size, flags))
PASS(ssize_t, sendto, (int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length),
     is_told(fd), "", (fd, data, size, flags, to, length))
PASS(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), is_told(fd), "", (fd, message, flags))
PASS(int, rename, (const char *old, const char *new), 1, new, (old, new))
PASS(int, renameat, (int a, const char *old, int b, const char *new), 1, new, (a, old, b, new))
PASS(int, renameat2, (int a, const char *old, int b, const char *new, unsigned int flags), 1, new, (a, old, b, new, flags))
PASS(int, unlink, (const char *path), 1, path, (path))
PASS(int, unlinkat, (int at, const char *path, int flags), 1, path, (at, path, flags))
PASS(int, mkdir, (const char *path, mode_t mode), 1, path, (path, mode))
PASS(int, mkdirat, (int at, const char *path, mode_t mode), 1, path, (at, path, mode))
PASS(int, rmdir, (const char *path), 1, path, (path))
PASS(int, link, (const char *old, const char *new), 1, new, (old, new))
PASS(int, linkat, (int a, const char *old, int b, const char *new, int flags), 1, new, (a, old, b, new, flags))
PASS(int, symlink, (const char *old, const char *new), 1, new, (old, new))
PASS(int, symlinkat, (const char *old, int at, const char *new), 1, new, (old, at, new))
PASS(int, ftruncate64, (int fd, off64_t size), 1, "", (fd, size))
int mount(const char *, const char *, const char *, unsigned long, const void *);
PASS(int, mount, (const char *from, const char *to, const char *type, unsigned long flags, const void *data), 1, to,
     (from, to, type, flags, data))
int setns(int, int);
PASS(int, setns, (int fd, int type), 1, "", (fd, type))
int unshare(int);
PASS(int, unshare, (int flags), 1, "", (flags))

#define OPEN(name, before, at)                                            \
	int name(before const char *path, int flags, ...)                  \
	{                                                                 \
		va_list more;                                             \
		va_start(more, flags);                                    \
		mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
		va_end(more);                                             \
		if (flags & (O_CREAT | O_TRUNC))                          \
			note(#name, path);                                \
		return kernel(SYS_openat, at, path, flags | O_LARGEFILE, mode); \
	}
#define AT int at,
OPEN(open64, , AT_FDCWD)
OPEN(openat64, AT, at)
OPEN(open, , AT_FDCWD)
OPEN(openat, AT, at)

static int changes(long command)
{
	switch (command) {
	case BPF_MAP_LOOKUP_ELEM: case BPF_MAP_GET_NEXT_KEY: case BPF_OBJ_GET: case BPF_PROG_TEST_RUN:
	case BPF_PROG_GET_NEXT_ID: case BPF_MAP_GET_NEXT_ID: case BPF_PROG_GET_FD_BY_ID:
	case BPF_MAP_GET_FD_BY_ID: case BPF_OBJ_GET_INFO_BY_FD: case BPF_PROG_QUERY:
	case BPF_BTF_GET_FD_BY_ID: case BPF_BTF_GET_NEXT_ID: case BPF_MAP_LOOKUP_BATCH:
	case BPF_LINK_GET_FD_BY_ID: case BPF_LINK_GET_NEXT_ID:
		return 0;
	}
	return 1;
}

long syscall(long number, ...)
{
	va_list more;
	long a[6];
	char name[16];

	va_start(more, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(more, long);
	va_end(more);
	if (number == SYS_bpf && changes(a[0])) {
		snprintf(name, sizeof(name), "%ld", a[0]);
		note("bpf", name);
	} else if (number == SYS_renameat2) {
		note("renameat2", (const char *)a[3]);
	}
	return kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
