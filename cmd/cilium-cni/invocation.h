// SPDX-License-Identifier: Apache-2.0
// How the runtime calls a plugin: environment, stdin, protocol versions (CNI spec 1.1, section 2), with
// the checks, codes and texts of the CNI library's skel package.
#pragma once

#include "netconf.h"

struct invocation {
	const char *command, *container_id, *netns, *ifname; // "" when absent
	bool netns_override; // CNI_NETNS_OVERRIDE: the node's own namespace is meant
	const char *stdin_text;
	size_t stdin_length;
	struct netconf conf;
};

// Read and check everything. Returns 0, or the exit code of an error already printed.
int read_invocation(struct invocation *call, const char *command);

// Versions of the CNI protocol this plugin serves, lowest first, NULL at the end.
extern const char *const served_versions[];

// Printed when cniVersion is not served; returns 0 or the exit code.
int check_version(const struct netconf *conf);

// Whether cniVersion is at least `version` ("0.4.0"); an absent one is 0.1.0.
bool version_reaches(const struct netconf *conf, const char *version);

// Chaining, as the original chooses it: the mode, or a network named like one; "" when not chained.
const char *chaining_mode(const struct netconf *conf);
bool chaining_mode_known(const char *mode);
