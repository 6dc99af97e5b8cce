// SPDX-License-Identifier: Apache-2.0
// A strict JSON scanner that keeps a few keys: see netconf.h.
#include "netconf.h"

#include "text.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_LIMIT = 1000 };

// A wanted key, at the top, or in an object there.
struct wanted {
	const char *object; // NULL: at the top
	const char *key;
	const char **text; // where a string goes
	bool *flag; // or a bool
	bool of_library; // the CNI library reads it, by a struct without a name
	struct text *fault; // where a value of a wrong type is described; NULL: it ends the scan
};

struct scanner {
	const char *at, *end;
	char *room; // where the next string is decoded to
	const char *string; // the string decoded last
	unsigned depth;
	const char *object; // the key of the object at the top that is being scanned
	const struct wanted *wanted;
	size_t key_count;
	struct text wrong;
};

static bool scan_value(struct scanner *s, const char *key);

static bool refuse(struct scanner *s, const char *context)
{
	if (s->wrong.length)
		return false;
	if (s->at >= s->end) {
		add(&s->wrong, "unexpected end of JSON input");
		return false;
	}
	unsigned char c = *s->at;
	char shown[] = { c < 0x80 ? c : 0xc0 | c >> 6, c < 0x80 ? 0 : 0x80 | (c & 0x3f), 0 }; // as Latin-1, like Go
	add(&s->wrong, "invalid character '");
	if (*s->at == '\n')
		add(&s->wrong, "\\n");
	else
		add(&s->wrong, *s->at == '\'' ? "\\'" : shown);
	add(&s->wrong, "' ");
	add(&s->wrong, context);
	return false;
}

// Describe a value of a wrong type; false if that ends the scan. Only the first one counts, as in Go.
static bool refuse_type(struct scanner *s, const char *found, const struct wanted *wanted, const char *expected)
{
	struct text *fault = wanted && wanted->fault ? wanted->fault : &s->wrong;
	if (fault->length)
		return fault != &s->wrong;
	add(fault, "json: cannot unmarshal ");
	add(fault, found);
	add(fault, " into Go ");
	if (wanted)
		add(fault, wanted->of_library ? "struct field ." : "struct field NetConf.");
	else
		add(fault, "value");
	if (wanted && wanted->object) {
		add(fault, wanted->object);
		add(fault, ".");
	}
	add(fault, wanted ? wanted->key : "");
	add(fault, " of type ");
	add(fault, expected);
	return fault != &s->wrong;
}

static void skip_space(struct scanner *s)
{
	while (s->at < s->end && (*s->at == ' ' || *s->at == '\t' || *s->at == '\n' || *s->at == '\r'))
		s->at++;
}

static bool take(struct scanner *s, char wanted)
{
	if (s->at >= s->end || *s->at != wanted)
		return false;
	s->at++;
	return true;
}

static bool scan_hex(struct scanner *s, uint32_t *unit)
{
	*unit = 0;
	for (int i = 0; i < 4; i++, s->at++) {
		char c = s->at < s->end ? *s->at : 0;
		int digit = c >= '0' && c <= '9'		 ? c - '0'
			    : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
								 : -1;
		if (digit < 0)
			return refuse(s, "in \\u hexadecimal character escape");
		*unit = *unit << 4 | digit;
	}
	return true;
}

static void put_rune(struct scanner *s, uint32_t rune)
{
	if (rune == 0 || (rune >= 0xd800 && rune < 0xe000))
		rune = 0xfffd; // a zero byte would end the C string early
	if (rune < 0x80) {
		*s->room++ = rune;
		return;
	}
	unsigned more = rune < 0x800 ? 1 : rune < 0x10000 ? 2 : 3;
	static const unsigned char lead[] = { 0, 0xc0, 0xe0, 0xf0 };
	*s->room++ = lead[more] | rune >> 6 * more;
	while (more--)
		*s->room++ = 0x80 | (rune >> 6 * more & 0x3f);
}

static bool scan_unicode(struct scanner *s)
{
	uint32_t unit, low;
	if (!scan_hex(s, &unit))
		return false;
	if (unit >= 0xd800 && unit < 0xdc00 && s->end - s->at >= 6 && s->at[0] == '\\' && s->at[1] == 'u') {
		const char *back = s->at;
		s->at += 2;
		if (!scan_hex(s, &low))
			return false;
		if (low >= 0xdc00 && low < 0xe000)
			unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
		else
			s->at = back;
	}
	put_rune(s, unit);
	return true;
}

// The opening quote has been taken; afterwards s->string is the decoded text.
static bool scan_string(struct scanner *s)
{
	static const char plain[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
	s->string = s->room;
	for (;;) {
		if (s->at >= s->end || (unsigned char)*s->at < 0x20)
			return refuse(s, "in string literal");
		char c = *s->at++;
		if (c == '"')
			break;
		if (c != '\\') {
			*s->room++ = c;
			continue;
		}
		if (take(s, 'u')) {
			if (!scan_unicode(s))
				return false;
			continue;
		}
		const char *known = s->at < s->end && *s->at ? strchr(plain, *s->at) : NULL;
		if (!known)
			return refuse(s, "in string escape code");
		*s->room++ = meant[known - plain];
		s->at++;
	}
	*s->room++ = 0;
	return true;
}

static bool scan_digits(struct scanner *s, const char *context)
{
	if (s->at >= s->end || *s->at < '0' || *s->at > '9')
		return refuse(s, context);
	while (s->at < s->end && *s->at >= '0' && *s->at <= '9')
		s->at++;
	return true;
}

static bool scan_number(struct scanner *s)
{
	take(s, '-');
	if (!take(s, '0') && !scan_digits(s, "in numeric literal"))
		return false;
	if (take(s, '.') && !scan_digits(s, "after decimal point in numeric literal"))
		return false;
	if (take(s, 'e') || take(s, 'E')) {
		if (!take(s, '+'))
			take(s, '-');
		return scan_digits(s, "in exponent of numeric literal");
	}
	return true;
}

static bool scan_literal(struct scanner *s, const char *literal)
{
	for (const char *wanted = literal; *wanted; wanted++)
		if (!take(s, *wanted)) {
			struct text context = { 0 };
			char expected[] = { *wanted, 0 };
			add(&context, "in literal ");
			add(&context, literal);
			add(&context, " (expecting '");
			add(&context, expected);
			add(&context, "')");
			return refuse(s, words(&context));
		}
	return true;
}

static bool scan_array(struct scanner *s)
{
	skip_space(s);
	if (take(s, ']'))
		return true;
	for (;;) {
		if (!scan_value(s, NULL))
			return false;
		skip_space(s);
		if (take(s, ']'))
			return true;
		if (!take(s, ','))
			return refuse(s, "after array element");
	}
}

static bool scan_object(struct scanner *s)
{
	unsigned depth = s->depth;
	skip_space(s);
	if (take(s, '}'))
		return true;
	for (;;) {
		skip_space(s);
		if (!take(s, '"'))
			return refuse(s, "looking for beginning of object key string");
		if (!scan_string(s))
			return false;
		const char *key = depth <= 2 ? s->string : NULL;
		if (depth == 1)
			s->object = key;
		skip_space(s);
		if (!take(s, ':'))
			return refuse(s, "after object key");
		if (!scan_value(s, key))
			return false;
		skip_space(s);
		if (take(s, '}'))
			return true;
		if (!take(s, ','))
			return refuse(s, "after object key:value pair");
	}
}

// The entry of a wanted key; NULL for any other.
static const struct wanted *wanted_of(const struct scanner *s, const char *key)
{
	for (size_t i = 0; key && i < s->key_count; i++) {
		const char *object = s->wanted[i].object;
		bool here = s->depth == 1 ? !object : object && s->object && !strcmp(s->object, object);
		if (here && !strcmp(key, s->wanted[i].key))
			return &s->wanted[i];
	}
	return NULL;
}

static bool scan_value(struct scanner *s, const char *key)
{
	const struct wanted *wanted = wanted_of(s, key);
	skip_space(s);
	char first = s->at < s->end ? *s->at : 0;
	bool good;
	const char *type;
	switch (first) {
	case '"':
		s->at++;
		type = "string";
		good = scan_string(s);
		break;
	case '{':
	case '[':
		if (s->depth++ == DEPTH_LIMIT) {
			add(&s->wrong, "exceeded max depth");
			return false;
		}
		s->at++;
		type = first == '{' ? "object" : "array";
		good = first == '{' ? scan_object(s) : scan_array(s);
		s->depth--;
		break;
	case 't':
	case 'f':
		type = "bool";
		good = scan_literal(s, first == 't' ? "true" : "false");
		break;
	case 'n':
		return scan_literal(s, "null"); // as good as absent
	default:
		if (first != '-' && (first < '0' || first > '9'))
			return refuse(s, "looking for beginning of value");
		type = "number";
		good = scan_number(s);
	}
	if (!good)
		return false;
	if (wanted && wanted->text && first != '"')
		return refuse_type(s, type, wanted, "string");
	if (wanted && wanted->flag && first != 't' && first != 'f')
		return refuse_type(s, type, wanted, "bool");
	if (wanted && wanted->text)
		*wanted->text = s->string;
	if (wanted && wanted->flag)
		*wanted->flag = first == 't';
	return true;
}

static const char *read_object(const struct wanted *wanted, size_t count, const char *text, size_t length,
			       char *room)
{
	static struct scanner s;
	for (size_t i = 0; i < count; i++)
		if (wanted[i].text)
			*wanted[i].text = "";
	s = (struct scanner){
		.at = text, .end = text + length, .room = room, .wanted = wanted, .key_count = count
	};
	skip_space(&s);
	bool object = s.at < s.end && *s.at == '{';
	if (!scan_value(&s, NULL))
		return words(&s.wrong);
	skip_space(&s);
	if (s.at < s.end)
		refuse(&s, "after top-level value");
	else if (!object)
		refuse_type(&s, "value", NULL, "NetConf");
	return s.wrong.length ? words(&s.wrong) : NULL;
}

const char *read_netconf(struct netconf *conf, const char *stdin_text, size_t length, char *room)
{
	static struct text version, type;
	const struct wanted wanted[] = {
		{ .key = "cniVersion", .text = &conf->cni_version, .of_library = true, .fault = &version },
		{ .key = "name", .text = &conf->name, .of_library = true },
		{ .key = "agent-socket", .text = &conf->agent_socket, .fault = &type },
		{ .key = "log-file", .text = &conf->log_file, .fault = &type },
		{ .key = "chaining-mode", .text = &conf->chaining_mode, .fault = &type },
		{ .key = "enable-debug", .flag = &conf->debug, .fault = &type },
		{ .object = "ipam", .key = "type", .text = &conf->ipam_type, .fault = &type },
	};
	conf->debug = false;
	const char *wrong = read_object(wanted, sizeof(wanted) / sizeof(*wanted), stdin_text, length, room);
	conf->version_fault = version.length ? words(&version) : NULL;
	conf->type_fault = type.length ? words(&type) : NULL;
	return wrong;
}

const char *read_error(struct cni_error *error, const char *text, size_t length, char *room)
{
	const struct wanted wanted[] = {
		{ .key = "msg", .text = &error->message },
		{ .key = "details", .text = &error->details },
	};
	return read_object(wanted, sizeof(wanted) / sizeof(*wanted), text, length, room);
}
