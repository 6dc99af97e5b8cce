// SPDX-License-Identifier: Apache-2.0
// The delete queue: what a DEL leaves behind for an agent that is down. A shared lock on
// the directory is held from before the last try to connect until the request is in a file, so that no DEL
// falls between the agent's drain and its sockets.
#pragma once

#include "text.h"

// Make the queue's directory beside `agent_socket` and lock it within `patience_ms`. Returns the lock
// (close it to unlock), or -1 with what went wrong in `problem`.
int lock_queue(const char *agent_socket, unsigned patience_ms, struct text *problem);

enum queued {
	QUEUED,
	QUEUE_FULL, // more than 256 entries; nothing was written
	QUEUE_FAILED,
};

// Write the request to delete all endpoints of `container_id`; the same request is the same file.
enum queued queue_delete(const char *agent_socket, const char *container_id, struct text *problem);
