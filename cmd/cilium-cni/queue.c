// SPDX-License-Identifier: Apache-2.0
// Files and an open-file-description lock (fcntl(2), F_OFD_SETLK): see queue.h.
#define _GNU_SOURCE
#include "queue.h"

#include "agent.h"
#include "sha256.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ENTRY_LIMIT = 256, RETRY_MS = 20 }; // the lockfile counts as an entry

static void add_directory(struct text *path, const char *agent_socket)
{
	size_t parent = strrchr(agent_socket, '/') - agent_socket;
	add(path, agent_socket);
	path->length = parent;
	add(path, "/deleteQueue");
}

static void explain(struct text *problem, const char *doing, const char *path, int error)
{
	add(problem, doing);
	add(problem, " ");
	add(problem, path);
	add(problem, ": ");
	add(problem, reason(error));
}

// mkdir -p with mode 0755 whatever the umask of the runtime.
static bool make_directory(const char *path)
{
	char prefix[sizeof(struct text)];
	mode_t before = umask(022);
	for (const char *slash = strchr(path + 1, '/');; slash = strchr(slash + 1, '/')) {
		size_t length = slash ? (size_t)(slash - path) : strlen(path);
		memcpy(prefix, path, length);
		prefix[length] = 0;
		if (mkdir(prefix, 0755) && errno != EEXIST)
			break;
		if (!slash) {
			umask(before);
			return true;
		}
	}
	umask(before);
	return false;
}

int lock_queue(const char *agent_socket, unsigned patience_ms, struct text *problem)
{
	struct text directory = { 0 }, path = { 0 };
	add_directory(&directory, agent_socket);
	if (!make_directory(words(&directory))) {
		explain(problem, "mkdir", words(&directory), errno);
		return -1;
	}
	add(&path, words(&directory));
	add(&path, "/lockfile");
	mode_t before = umask(022);
	int lock = open(words(&path), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	umask(before);
	if (lock < 0) {
		explain(problem, "open", words(&path), errno);
		return -1;
	}
	struct flock shared = { .l_type = F_RDLCK, .l_whence = SEEK_SET };
	for (int64_t deadline = now_ms() + patience_ms; fcntl(lock, F_OFD_SETLK, &shared);) {
		if (errno != EAGAIN && errno != EACCES && errno != EINTR) {
			explain(problem, "lock", words(&path), errno);
			close(lock);
			return -1;
		}
		if (now_ms() >= deadline) {
			add(problem, "failed to acquire lock: context deadline exceeded");
			close(lock);
			return -1;
		}
		pause_ms(RETRY_MS);
	}
	return lock;
}

static int count_entries(const char *path)
{
	DIR *directory = opendir(path);
	int count = -2; // "." and ".."
	if (!directory)
		return -1;
	while (readdir(directory))
		count++;
	closedir(directory);
	return count < 0 ? 0 : count;
}

enum queued queue_delete(const char *agent_socket, const char *container_id, struct text *problem)
{
	struct text path = { 0 }, contents = { 0 };
	char digest[65];
	add_directory(&path, agent_socket);
	int count = count_entries(words(&path));
	if (count < 0) {
		explain(problem, "open", words(&path), errno);
		return QUEUE_FAILED;
	}
	if (count > ENTRY_LIMIT) {
		add(problem, "deletion queue directory ");
		add(problem, words(&path));
		add(problem, " has too many entries; aborting");
		return QUEUE_FULL;
	}
	add(&contents, "{\"container-id\":");
	add_json(&contents, container_id);
	add(&contents, "}");
	sha256_hex(contents.bytes, contents.length, digest);
	add(&path, "/");
	add(&path, digest);
	add(&path, ".delete");
	mode_t before = umask(022);
	int fd = open(words(&path), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
	umask(before);
	if (fd < 0 || !write_all(fd, contents.bytes, contents.length)) {
		explain(problem, "write", words(&path), errno);
		if (fd >= 0) {
			unlink(words(&path));
			close(fd);
		}
		return QUEUE_FAILED;
	}
	close(fd);
	return QUEUED;
}
