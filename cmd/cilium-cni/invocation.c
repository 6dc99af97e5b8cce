// SPDX-License-Identifier: Apache-2.0
// The checks of containernetworking/cni's skel and utils packages: see invocation.h.
#include "invocation.h"

#include "text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
	STDIN_LIMIT = 128 << 10, // bytes; request and reply are one packet each
	ID_LIMIT = 1024, // of what a runtime calls a container, so that it is whole in a queued delete
};

const char *const served_versions[] = { "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0", NULL };

static const char *variable(const char *name)
{
	const char *value = getenv(name);
	return value ? value : "";
}

static bool one_of(const char *value, const char *const *values)
{
	for (; *values; values++)
		if (!strcmp(value, *values))
			return true;
	return false;
}

// ^[a-zA-Z0-9][a-zA-Z0-9_.-]*$
static bool is_identifier(const char *value)
{
	static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
	return strspn(value, letters) == strlen(value) && !strchr("_.-", *value);
}

static int check_ifname(const char *name)
{
	if (strlen(name) > 15)
		return fail(CNI_INVALID_ENVIRONMENT, "interface name is too long",
			    "interface name should be less than 16 characters");
	if (!strcmp(name, ".") || !strcmp(name, ".."))
		return fail(CNI_INVALID_ENVIRONMENT, "interface name is . or ..", "");
	if (strpbrk(name, "/: \t\n\v\f\r"))
		return fail(CNI_INVALID_ENVIRONMENT, "interface name contains / or : or whitespace characters", "");
	return 0;
}

static int read_environment(struct invocation *call)
{
	static const char *const attaching[] = { "ADD", "CHECK", "DEL", NULL };
	static const char *const known[] = { "ADD", "CHECK", "DEL", "GC", "STATUS", NULL };
	struct text missing = { 0 };
	bool attachment = one_of(call->command, attaching);
	struct {
		const char *name, **value;
		bool required;
	} variables[] = {
		{ "CNI_CONTAINERID", &call->container_id, attachment },
		{ "CNI_NETNS", &call->netns, attachment && strcmp(call->command, "DEL") },
		{ "CNI_IFNAME", &call->ifname, attachment },
		{ "CNI_PATH", &(const char *){ NULL }, one_of(call->command, known) },
	};
	for (size_t i = 0; i < sizeof(variables) / sizeof(*variables); i++) {
		*variables[i].value = variable(variables[i].name);
		if (!variables[i].required || **variables[i].value)
			continue;
		add(&missing, missing.length ? "," : "required env variables [");
		add(&missing, variables[i].name);
	}
	if (attachment && *call->container_id && !is_identifier(call->container_id))
		return fail(CNI_INVALID_ENVIRONMENT, "invalid characters in containerID", call->container_id);
	if (attachment && strlen(call->container_id) > ID_LIMIT)
		return fail(CNI_INVALID_ENVIRONMENT, "containerID is too long", "expected at most 1024 bytes");
	if (attachment && *call->ifname && check_ifname(call->ifname))
		return 1;
	// The kernel takes it for a pattern, and would name the interface otherwise.
	if (!strcmp(call->command, "ADD") && strchr(call->ifname, '%'))
		return fail(CNI_INVALID_ENVIRONMENT, "interface name contains %", "");
	if (missing.length) {
		add(&missing, "] missing");
		return fail(CNI_INVALID_ENVIRONMENT, words(&missing), "");
	}
	const char *override = variable("CNI_NETNS_OVERRIDE");
	static const char *const yes[] = { "1", "TRUE", "true", "True", NULL };
	call->netns_override = one_of(override, yes);
	return 0;
}

static int read_stdin(struct invocation *call)
{
	static char bytes[STDIN_LIMIT];
	size_t used = 0;
	for (ssize_t got; (got = read(STDIN_FILENO, bytes + used, sizeof(bytes) - used)); used += got) {
		if (got < 0 && errno == EINTR)
			got = 0;
		else if (got < 0) {
			struct text message = { 0 };
			add(&message, "error reading from stdin: ");
			add(&message, reason(errno));
			return fail(CNI_IO_FAILURE, words(&message), "");
		}
		if (used + got == sizeof(bytes))
			return fail(CNI_DECODING_FAILURE, "network configuration on stdin is too long",
				    "expected less than 131072 bytes");
	}
	call->stdin_text = bytes;
	call->stdin_length = used;
	return 0;
}

static int check_config(const struct netconf *conf)
{
	if (!*conf->name)
		return fail(CNI_INVALID_CONFIG, "missing network name", "");
	if (!is_identifier(conf->name))
		return fail(CNI_INVALID_CONFIG, "invalid characters found in network name", conf->name);
	if (*conf->agent_socket && (*conf->agent_socket != '/' || strlen(conf->agent_socket) > 107))
		return fail(CNI_INVALID_CONFIG,
			    "agent-socket is not usable: expected an absolute path of at most 107 bytes",
			    conf->agent_socket);
	return 0;
}

int read_invocation(struct invocation *call, const char *command)
{
	static char room[STDIN_LIMIT + 8];
	*call = (struct invocation){ .command = command };
	if (read_environment(call) || read_stdin(call))
		return 1;
	const char *wrong = read_netconf(&call->conf, call->stdin_text, call->stdin_length, room);
	if (wrong) {
		struct text message = { 0 };
		add(&message, "error unmarshall network config: ");
		add(&message, wrong);
		return fail(CNI_DECODING_FAILURE, words(&message), "");
	}
	if (one_of(call->conf.cni_version, served_versions))
		error_version = call->conf.cni_version;
	log_path = call->conf.log_file;
	if (check_config(&call->conf))
		return 1;
	if (call->conf.version_fault) {
		struct text message = { 0 };
		add(&message, "decoding version from network config: ");
		add(&message, call->conf.version_fault);
		return fail(CNI_DECODING_FAILURE, words(&message), "");
	}
	return 0;
}

int check_version(const struct netconf *conf)
{
	const char *version = *conf->cni_version ? conf->cni_version : "0.1.0";
	if (one_of(version, served_versions))
		return 0;
	struct text details = { 0 };
	add(&details, "config is ");
	add_json(&details, version);
	add(&details, ", plugin supports [");
	for (const char *const *served = served_versions; *served; served++) {
		add(&details, served == served_versions ? "" : " ");
		add_json(&details, *served);
	}
	add(&details, "]");
	return fail(CNI_INCOMPATIBLE_VERSION, "incompatible CNI versions", words(&details));
}

bool version_reaches(const struct netconf *conf, const char *version)
{
	const char *have = *conf->cni_version ? conf->cni_version : "0.1.0";
	for (int part = 0; part < 3; part++) {
		char *have_end, *version_end;
		long ours = strtol(have, &have_end, 10), wanted = strtol(version, &version_end, 10);
		if (ours != wanted)
			return ours > wanted;
		have = *have_end == '.' ? have_end + 1 : "0";
		version = *version_end == '.' ? version_end + 1 : "0";
	}
	return true;
}

bool chaining_mode_known(const char *mode)
{
	static const char *const modes[] = { "aws-cni", "azure", "flannel", "generic-veth", NULL };
	return one_of(mode, modes);
}

const char *chaining_mode(const struct netconf *conf)
{
	if (*conf->chaining_mode)
		return conf->chaining_mode;
	return chaining_mode_known(conf->name) ? conf->name : "";
}
