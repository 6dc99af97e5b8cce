// SPDX-License-Identifier: Apache-2.0
// Runs a CNI plugin for many pods, so many at once, and times each run from its start to its end.
//
//   spawn COUNT_AT_ONCE PLUGIN COMMAND CNI_PATH STDIN_FILE < "container-id netns-path" lines
//
// Prints a line per run: container id, start and end in ns since the first start of its batch, CPU
// time in ns (the process and what it waited for), exit code. Written in C because a Python parent
// adds a millisecond to each start, more than what is measured.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_AT_ONCE = 256 };

struct job {
	char id[128];
	char netns[256];
	pid_t pid;
	int64_t start, end, cpu;
	int status;
};

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what)
{
	fprintf(stderr, "spawn: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void start(struct job *job, char *plugin, char *command, char *path, char *stdin_file)
{
	char env[5][512];
	char *argv[] = { plugin, NULL };
	char *envp[] = { env[0], env[1], env[2], env[3], env[4], "CNI_IFNAME=eth0", NULL };
	posix_spawn_file_actions_t files;

	snprintf(env[0], sizeof(env[0]), "CNI_COMMAND=%s", command);
	snprintf(env[1], sizeof(env[1]), "CNI_CONTAINERID=%s", job->id);
	snprintf(env[2], sizeof(env[2]), "CNI_NETNS=%s", job->netns);
	snprintf(env[3], sizeof(env[3]), "CNI_PATH=%s", path);
	snprintf(env[4], sizeof(env[4]), "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME=%.64s",
		 job->id);
	posix_spawn_file_actions_init(&files);
	posix_spawn_file_actions_addopen(&files, 0, stdin_file, O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
	job->start = now();
	errno = posix_spawn(&job->pid, plugin, &files, NULL, argv, envp);
	if (errno)
		die(plugin);
	posix_spawn_file_actions_destroy(&files);
}

static void reap(struct job *jobs, int count)
{
	struct rusage use;
	int status;
	pid_t pid = wait4(-1, &status, 0, &use);
	int64_t end = now();

	if (pid < 0)
		die("wait");
	for (int i = 0; i < count; i++) {
		if (jobs[i].pid != pid)
			continue;
		jobs[i].end = end;
		jobs[i].status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		jobs[i].cpu = (use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1000000000LL +
			      (use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1000LL;
	}
}

int main(int argc, char **argv)
{
	static struct job jobs[MAX_AT_ONCE];
	int at_once, count;

	if (argc != 6 || (at_once = atoi(argv[1])) < 1 || at_once > MAX_AT_ONCE) {
		fprintf(stderr, "usage: spawn AT_ONCE PLUGIN COMMAND CNI_PATH STDIN_FILE < pods\n");
		return 2;
	}
	do {
		for (count = 0; count < at_once; count++)
			if (scanf("%127s %255s", jobs[count].id, jobs[count].netns) != 2)
				break;
		for (int i = 0; i < count; i++)
			start(&jobs[i], argv[2], argv[3], argv[4], argv[5]);
		for (int i = 0; i < count; i++)
			reap(jobs, count);
		for (int i = 0; i < count; i++)
			printf("%s %lld %lld %lld %d\n", jobs[i].id, (long long)(jobs[i].start - jobs[0].start),
			       (long long)(jobs[i].end - jobs[0].start), (long long)jobs[i].cpu, jobs[i].status);
	} while (count == at_once);
	return 0;
}
