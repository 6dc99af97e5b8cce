// SPDX-License-Identifier: Apache-2.0
// The network configuration on stdin, read only as far as the plugin itself needs it: the agent reads
// the rest. Needs: text.h. Gives: struct netconf, from a strict scan of the whole text (RFC 8259).
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct netconf {
	const char *cni_version;   // "" when absent
	const char *name;          // "" when absent
	const char *agent_socket;  // "" when absent
	const char *chaining_mode; // "" when absent
	const char *log_file;      // "" when absent
	bool debug;                // enable-debug
};

// Fill `conf` from `length` bytes at `stdin_text`; strings go to `room`, which holds length + 8 bytes.
// Returns NULL, or what is wrong in the words of Go's encoding/json, which people know to search for.
const char *read_netconf(struct netconf *conf, const char *stdin_text, size_t length, char *room);
