// SPDX-License-Identifier: Apache-2.0
// The plugin that hands out addresses instead of the agent (ipam.type): found in CNI_PATH and called with this
// plugin's own environment and stdin, in the namespace it was called in (CNI spec 1.1, section 4).
#pragma once

#include "invocation.h"

struct delegated {
	int exit_code; // 0: it did what it was asked
	const char *text; // what it printed: a result, or an error
	size_t length; // in bytes
	const char *problem; // "" or why it could not be called at all
};

// Whether the configuration names one. In a chain the address is the business of the plugin before us.
bool has_delegate(const struct invocation *call);

// Call it with this CNI_COMMAND and wait for its end; its stderr goes to the runtime.
// One answer at a time: the text lasts until the next call.
struct delegated call_delegate(const struct invocation *call, const char *command);

// Say "`what`: <its error>" as this plugin's error. Returns the exit code, 1.
int fail_delegate(const struct delegated *answer, const char *what);

// Print its error as it is, if it failed. Returns the exit code.
int pass_on_delegate(const struct delegated *answer, const char *what);
