// SPDX-License-Identifier: Apache-2.0
// Netlink exchanges in a background thread: see AsyncExchange in connection.py, which loads this library.
// The kernel processes a request within send(2) and answers before it returns (netlink(7)). A C thread runs
// it without Python's GIL, so neither it nor the event loop waits for the other.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/netlink.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { REQUEST_LIMIT = 4096, ANSWER_LIMIT = 32768, STACK = 65536 };

enum state { IDLE, STARTED, DONE, CLOSING };

struct exchange {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	pthread_t thread;
	enum state state;
	int fd, error;
	uint32_t last; // sequence number of the last request
	uint32_t request_length, answer_length;
	char request[REQUEST_LIMIT];
	char answer[ANSWER_LIMIT] __attribute__((aligned(NLMSG_ALIGNTO)));
};

// Return whether these messages contain the answer to the last request.
static bool has_last_answer(const char *messages, uint32_t length, uint32_t last)
{
	for (uint32_t at = 0; at + sizeof(struct nlmsghdr) <= length;) {
		const struct nlmsghdr *header = (const void *)(messages + at);
		if (header->nlmsg_seq == last || header->nlmsg_len < sizeof(*header))
			return true;
		at += NLMSG_ALIGN(header->nlmsg_len);
	}
	return false;
}

static int perform(struct exchange *exchange)
{
	exchange->answer_length = 0;
	if (send(exchange->fd, exchange->request, exchange->request_length, 0) < 0)
		return errno;
	for (;;) {
		uint32_t before = exchange->answer_length;
		ssize_t length = recv(exchange->fd, exchange->answer + before, ANSWER_LIMIT - before, MSG_DONTWAIT);
		if (length < 0)
			return errno;
		exchange->answer_length = before + NLMSG_ALIGN(length);
		if (has_last_answer(exchange->answer + before, length, exchange->last))
			return 0;
		if (exchange->answer_length >= ANSWER_LIMIT)
			return EMSGSIZE;
	}
}

static void *run_exchanges(void *argument)
{
	struct exchange *exchange = argument;
	pthread_mutex_lock(&exchange->lock);
	while (exchange->state != CLOSING) {
		if (exchange->state != STARTED) {
			pthread_cond_wait(&exchange->changed, &exchange->lock);
			continue;
		}
		pthread_mutex_unlock(&exchange->lock);
		int error = perform(exchange);
		pthread_mutex_lock(&exchange->lock);
		exchange->error = error;
		if (exchange->state == STARTED)
			exchange->state = DONE;
		pthread_cond_broadcast(&exchange->changed);
	}
	pthread_mutex_unlock(&exchange->lock);
	return NULL;
}

// Start a thread for exchanges over this netlink socket. The caller closes the socket, after exchange_close().
// Returns NULL and sets errno on failure.
struct exchange *exchange_open(int fd)
{
	struct exchange *exchange = calloc(1, sizeof(*exchange));
	pthread_attr_t attributes;
	sigset_t all, before;
	if (!exchange)
		return NULL;
	exchange->fd = fd;
	pthread_mutex_init(&exchange->lock, NULL);
	pthread_cond_init(&exchange->changed, NULL);
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK);
	sigfillset(&all); // the main thread handles signals
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int error = pthread_create(&exchange->thread, &attributes, run_exchanges, exchange);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	if (!error)
		return exchange;
	free(exchange);
	errno = error;
	return NULL;
}

// Hand requests to the thread; returns 0 or an errno: EBUSY until exchange_finish() returned the previous answers.
int exchange_start(struct exchange *exchange, const void *request, uint32_t length, uint32_t last)
{
	int error = 0;
	if (length > REQUEST_LIMIT)
		return EMSGSIZE;
	pthread_mutex_lock(&exchange->lock);
	if (exchange->state != IDLE) {
		error = EBUSY;
	} else {
		memcpy(exchange->request, request, length);
		exchange->request_length = length;
		exchange->last = last;
		exchange->state = STARTED;
		pthread_cond_broadcast(&exchange->changed);
	}
	pthread_mutex_unlock(&exchange->lock);
	return error;
}

// Wait for the answers; returns their length or a negative errno. The buffer is valid until the next start.
int64_t exchange_finish(struct exchange *exchange, const void **answer)
{
	pthread_mutex_lock(&exchange->lock);
	while (exchange->state == STARTED)
		pthread_cond_wait(&exchange->changed, &exchange->lock);
	int64_t result = exchange->error ? -exchange->error : (int64_t)exchange->answer_length;
	if (exchange->state != DONE)
		result = -EINVAL;
	else
		exchange->state = IDLE;
	*answer = exchange->answer;
	pthread_mutex_unlock(&exchange->lock);
	return result;
}

// End the thread after the current exchange, and free everything.
void exchange_close(struct exchange *exchange)
{
	pthread_mutex_lock(&exchange->lock);
	exchange->state = CLOSING;
	pthread_cond_broadcast(&exchange->changed);
	pthread_mutex_unlock(&exchange->lock);
	pthread_join(exchange->thread, NULL);
	pthread_cond_destroy(&exchange->changed);
	pthread_mutex_destroy(&exchange->lock);
	free(exchange);
}
