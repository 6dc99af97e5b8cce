// SPDX-License-Identifier: Apache-2.0
// The network configuration on stdin, read only as far as the plugin itself needs it: the agent reads
// the rest, from a strict scan of the whole text (RFC 8259). Also reads the error of another plugin.
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct netconf {
	const char *cni_version; // "" when absent
	const char *name; // "" when absent
	const char *agent_socket; // "" when absent
	const char *chaining_mode; // "" when absent
	const char *log_file; // "" when absent
	const char *ipam_type; // ipam.type, the plugin that addresses are asked of; "" when absent
	bool debug; // enable-debug
	const char *version_fault; // a cniVersion that is not a string, in the words of Go's library; NULL if it is
	const char *type_fault; // the first other value of a wrong type; NULL if there is none
};

// Fill `conf` from `length` bytes at `stdin_text`; strings go to `room`, which holds length + 8 bytes.
// Returns NULL, or what is wrong in the words of Go's encoding/json, which people know to search for.
const char *read_netconf(struct netconf *conf, const char *stdin_text, size_t length, char *room);

// What a plugin printed instead of a result (CNI spec 1.1, section 5).
struct cni_error {
	const char *message, *details; // "" when absent
};

// The same for an error object.
const char *read_error(struct cni_error *error, const char *text, size_t length, char *room);
