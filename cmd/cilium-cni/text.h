// SPDX-License-Identifier: Apache-2.0
// A bounded text buffer, and the plugin's output: errors on stdout, notes on stderr and in
// the log file. No stdio: it would be most of the plugin's start time.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Bytes that do not fit are dropped: texts are for people, and the buffers are far larger than they.
struct text {
	size_t length;
	char bytes[4096];
};

void add(struct text *text, const char *words);
void add_number(struct text *text, uint64_t number);
void add_json(struct text *text, const char *words); // quoted and escaped
const char *words(struct text *text); // zero-terminated view

// "connection refused": strerror(3) with a small first letter, as the Go plugin prints it.
const char *reason(int error);

bool write_all(int fd, const void *bytes, size_t length);

// CNI error codes (CNI spec 1.1, section 5 "Error"); 999 is the library's "internal" one.
enum {
	CNI_INCOMPATIBLE_VERSION = 1,
	CNI_INVALID_ENVIRONMENT = 4,
	CNI_IO_FAILURE = 5,
	CNI_DECODING_FAILURE = 6,
	CNI_INVALID_CONFIG = 7,
	CNI_INVALID_NETNS = 8,
	CNI_TRY_AGAIN = 11,
	CNI_NOT_AVAILABLE = 50,
	CNI_INTERNAL = 999,
};

// Protocol version of the errors the plugin itself prints; the highest one until stdin has been read.
extern const char *error_version;

// Print a CNI error object and return the exit code, always 1. `details` may be "".
int fail(unsigned code, const char *message, const char *details);

// Where notes go besides stderr; NULL or "" for nowhere.
extern const char *log_path;
void note(const char *level, const char *message);
