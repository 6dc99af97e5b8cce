// SPDX-License-Identifier: Apache-2.0
// fork(2), execve(2), memfd_create(2): see delegate.h.
#define _GNU_SOURCE
#include "delegate.h"

#include "netns.h"
#include "text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ANSWER_LIMIT = 64 << 10, PATH_LIMIT = 4096 };

bool has_delegate(const struct invocation *call)
{
	return *call->conf.ipam_type && !*chaining_mode(&call->conf);
}

static struct delegated not_called(struct text *problem)
{
	return (struct delegated){ .exit_code = 1, .text = "", .problem = words(problem) };
}

// The first executable file of that name in CNI_PATH.
static bool find(const char *name, char *path, struct text *problem)
{
	const char *directories = getenv("CNI_PATH");
	add(problem, strchr(name, '/') ? "invalid plugin name: " : "failed to find plugin ");
	add_json(problem, name);
	if (strchr(name, '/'))
		return false;
	add(problem, " in path [");
	for (const char *at = directories ? directories : ""; *at;) {
		size_t length = strcspn(at, ":");
		struct stat about;
		if (length && length + strlen(name) + 2 <= PATH_LIMIT) {
			memcpy(path, at, length);
			path[length] = '/';
			strcpy(path + length + 1, name);
			if (!stat(path, &about) && S_ISREG(about.st_mode) && !access(path, X_OK))
				return true;
		}
		at += length + (at[length] == ':');
	}
	add(problem, directories ? directories : "");
	add(problem, "]");
	return false;
}

// A file in memory: unlike a pipe, it needs no reader while it is written.
static int memory_file(const void *bytes, size_t length)
{
	int fd = memfd_create("cni", MFD_CLOEXEC);
	if (fd >= 0 && (!write_all(fd, bytes, length) || lseek(fd, 0, SEEK_SET))) {
		close(fd);
		return -1;
	}
	return fd;
}

static void become(const char *path, const char *name, const char *command, int in, int out)
{
	char *const arguments[] = { (char *)name, NULL };
	extern char **environ;
	if (!leave_netns() || dup2(in, STDIN_FILENO) < 0 || dup2(out, STDOUT_FILENO) < 0 ||
	    setenv("CNI_COMMAND", command, 1))
		_exit(127);
	execve(path, arguments, environ);
	_exit(127);
}

static bool read_answer(int fd, char *to, size_t *length)
{
	*length = 0;
	if (lseek(fd, 0, SEEK_SET))
		return false;
	for (ssize_t got; (got = read(fd, to + *length, ANSWER_LIMIT - *length)); *length += got)
		if (got < 0)
			return false;
	return *length < ANSWER_LIMIT;
}

struct delegated call_delegate(const struct invocation *call, const char *command)
{
	static struct text problem;
	static char answer[ANSWER_LIMIT], path[PATH_LIMIT];
	const char *name = call->conf.ipam_type;
	size_t length;
	int status;
	problem.length = 0;
	if (!find(name, path, &problem))
		return not_called(&problem);
	problem.length = 0;
	add(&problem, path);
	int in = memory_file(call->stdin_text, call->stdin_length), out = memory_file("", 0);
	pid_t child = in < 0 || out < 0 ? -1 : fork();
	if (child < 0) {
		add(&problem, " cannot be started: ");
		add(&problem, reason(errno));
		return not_called(&problem);
	}
	if (!child)
		become(path, name, command, in, out);
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR) {
			add(&problem, " cannot be waited for: ");
			add(&problem, reason(errno));
			return not_called(&problem);
		}
	bool read = read_answer(out, answer, &length);
	close(in);
	close(out);
	if (!WIFEXITED(status)) {
		add(&problem, " was ended by signal ");
		add_number(&problem, WTERMSIG(status));
		return not_called(&problem);
	}
	if (!read) {
		add(&problem, " printed too much to be a result");
		return not_called(&problem);
	}
	return (struct delegated){ WEXITSTATUS(status), answer, length, "" };
}

int fail_delegate(const struct delegated *answer, const char *what)
{
	static char room[ANSWER_LIMIT + 8];
	struct text message = { 0 }, no_error = { 0 };
	struct cni_error error = { "", "" };
	add(&message, what);
	add(&message, ": ");
	if (*answer->problem) {
		add(&message, answer->problem);
		return fail(CNI_INTERNAL, words(&message), "");
	}
	if (read_error(&error, answer->text, answer->length, room) || !*error.message) {
		add(&no_error, "netplugin failed with no error message: exit status ");
		add_number(&no_error, answer->exit_code);
		error = (struct cni_error){ words(&no_error), "" };
	}
	add(&message, error.message);
	return fail(CNI_INTERNAL, words(&message), error.details);
}

int pass_on_delegate(const struct delegated *answer, const char *what)
{
	if (!answer->exit_code)
		return 0;
	if (*answer->problem || !answer->length)
		return fail_delegate(answer, what);
	write_all(STDOUT_FILENO, answer->text, answer->length);
	return 1;
}
