// A preload that moves CLOCK_REALTIME by as many seconds as the file at CLOCK_OFFSET says, whenever it is read.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int64_t offset = 0;
	int result = syscall(SYS_clock_gettime, clock, now);
	const char *path = clock == CLOCK_REALTIME ? getenv("CLOCK_OFFSET") : NULL;
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0)
		return result;
	if (read(fd, &offset, sizeof(offset)) == sizeof(offset))
		now->tv_sec += offset;
	close(fd);
	return result;
}

time_t time(time_t *where)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	if (where)
		*where = now.tv_sec;
	return now.tv_sec;
}
