// SPDX-License-Identifier: Apache-2.0
// Text without stdio: see text.h.
#define _GNU_SOURCE
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
	LOG_LIMIT = 10 << 20, // bytes; the file then becomes <file>.1, replacing the one before
	STRING_LIMIT = 1600, // bytes of one JSON string: an error with two of them is whole in one struct text
};

const char *error_version = "1.0.0";
const char *log_path;

static void add_bytes(struct text *text, const char *bytes, size_t length)
{
	size_t room = sizeof(text->bytes) - 1 - text->length;
	if (length > room)
		length = room;
	memcpy(text->bytes + text->length, bytes, length);
	text->length += length;
}

void add(struct text *text, const char *words)
{
	add_bytes(text, words, strlen(words));
}

void add_number(struct text *text, uint64_t number)
{
	char digits[20];
	size_t at = sizeof(digits);
	do
		digits[--at] = '0' + number % 10;
	while (number /= 10);
	add_bytes(text, digits + at, sizeof(digits) - at);
}

// Length of the UTF-8 sequence at `at`, 0 when there is none (RFC 3629; overlong forms are let pass).
static size_t utf8_length(const unsigned char *at)
{
	size_t length = *at < 0x80 ? 1 : *at < 0xc2 ? 0 : *at < 0xe0 ? 2 : *at < 0xf0 ? 3 : *at < 0xf5 ? 4 : 0;
	for (size_t i = 1; i < length; i++)
		if ((at[i] & 0xc0) != 0x80)
			return 0;
	return length;
}

void add_json(struct text *text, const char *words)
{
	static const char hex[] = "0123456789abcdef";
	add(text, "\"");
	size_t begin = text->length;
	for (size_t step; *words; words += step) {
		if (text->length - begin > STRING_LIMIT) {
			add(text, "...");
			break;
		}
		unsigned char c = *words;
		size_t length = utf8_length((const unsigned char *)words);
		step = length ? length : 1;
		if (c == '\n') {
			add(text, "\\n");
		} else if (c < 0x20) {
			char escape[] = { '\\', 'u', '0', '0', hex[c >> 4], hex[c & 15] };
			add_bytes(text, escape, sizeof(escape));
		} else if (!length) {
			add(text, "\\ufffd");
		} else {
			if (c == '"' || c == '\\')
				add(text, "\\");
			add_bytes(text, words, length);
		}
	}
	add(text, "\"");
}

const char *words(struct text *text)
{
	text->bytes[text->length] = 0;
	return text->bytes;
}

const char *reason(int error)
{
	static char lower[128];
	strncpy(lower, strerror(error), sizeof(lower) - 1);
	if (lower[0] >= 'A' && lower[0] <= 'Z' && lower[1] >= 'a')
		lower[0] += 'a' - 'A';
	return lower;
}

bool write_all(int fd, const void *bytes, size_t length)
{
	const char *at = bytes;
	while (length) {
		ssize_t written = write(fd, at, length);
		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0)
			return false;
		at += written;
		length -= written;
	}
	return true;
}

int fail(unsigned code, const char *message, const char *details)
{
	struct text out = { 0 };
	add(&out, "{\"cniVersion\":");
	add_json(&out, error_version);
	add(&out, ",\"code\":");
	add_number(&out, code);
	add(&out, ",\"msg\":");
	add_json(&out, message);
	if (*details) {
		add(&out, ",\"details\":");
		add_json(&out, details);
	}
	add(&out, "}\n");
	write_all(STDOUT_FILENO, out.bytes, out.length);
	return 1;
}

static void add_two(struct text *text, int number)
{
	char digits[2] = { '0' + number / 10, '0' + number % 10 };
	add_bytes(text, digits, sizeof(digits));
}

static void add_time(struct text *text)
{
	time_t now = time(NULL);
	struct tm utc;
	gmtime_r(&now, &utc);
	add_number(text, utc.tm_year + 1900);
	int parts[] = { utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec };
	for (size_t i = 0; i < 5; i++) {
		add_bytes(text, &"--T::"[i], 1);
		add_two(text, parts[i]);
	}
	add(text, "Z");
}

void note(const char *level, const char *message)
{
	struct text line = { 0 };
	add(&line, "time=\"");
	add_time(&line);
	add(&line, "\" level=");
	add(&line, level);
	add(&line, " msg=");
	add_json(&line, message);
	add(&line, " subsys=cilium-cni\n");
	write_all(STDERR_FILENO, line.bytes, line.length);
	if (!log_path || !*log_path)
		return;
	int fd = open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0644); // a pipe would wait
	if (fd < 0)
		return; // stderr has the line; a full disk must not fail a DEL
	struct stat about;
	if (!fstat(fd, &about) && about.st_size > LOG_LIMIT) {
		struct text old = { 0 };
		add(&old, log_path);
		add(&old, ".1");
		rename(log_path, words(&old)); // the open descriptor follows: this line ends the old file
	}
	write_all(fd, line.bytes, line.length);
	close(fd);
}
