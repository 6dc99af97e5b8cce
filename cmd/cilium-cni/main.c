// SPDX-License-Identifier: Apache-2.0
// cilium-cni: the CNI plugin (CNI spec 1.1) a container runtime starts for every pod. It does what only
// a process in the runtime's place can do - open the pod's namespace - and hands the rest to the agent
// over cni.sock. VERSION, and a DEL that it leaves in the delete queue, work without an agent.
// Static and free of stdio, because its start is part of every pod's start.
#include "agent.h"
#include "delegate.h"
#include "invocation.h"
#include "netns.h"
#include "queue.h"
#include "text.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef PLUGIN_VERSION
#define PLUGIN_VERSION "0.1.0"
#endif
#ifndef ADD_PATIENCE_MS
#define ADD_PATIENCE_MS 30000 // for an agent that is not there
#endif
#ifndef DEL_PATIENCE_MS
#define DEL_PATIENCE_MS 1000
#endif
#ifndef LOCK_PATIENCE_MS
#define LOCK_PATIENCE_MS 10000
#endif
#ifndef ANSWER_PATIENCE_MS
#define ANSWER_PATIENCE_MS 90000 // for an agent that is there
#endif

static const char *socket_path(const struct invocation *call)
{
	return *call->conf.agent_socket ? call->conf.agent_socket : DEFAULT_AGENT_SOCKET;
}

static int print_versions(void)
{
	struct text out = { 0 };
	add(&out, "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":["); // the library's own, as recorded
	for (const char *const *served = served_versions; *served; served++) {
		add(&out, served == served_versions ? "" : ",");
		add_json(&out, *served);
	}
	add(&out, "]}\n");
	return !write_all(STDOUT_FILENO, out.bytes, out.length);
}

static int print_about(void)
{
	struct text out = { 0 };
	add(&out, "Cilium CNI plugin " PLUGIN_VERSION " (hive)\nCNI protocol versions supported: ");
	for (const char *const *served = served_versions; *served; served++) {
		add(&out, served == served_versions ? "" : ", ");
		add(&out, *served);
	}
	add(&out, "\n");
	write_all(STDERR_FILENO, out.bytes, out.length);
	return 0;
}

static int fail_netns(const struct invocation *call, enum netns_fault fault)
{
	if (fault == NETNS_OURS)
		return fail(CNI_INVALID_NETNS, "plugin's netns and netns from CNI_NETNS should not be the same",
			    "");
	struct text message = { 0 };
	add(&message, "opening netns pinned at ");
	add(&message, call->netns);
	add(&message, ": open ");
	add(&message, call->netns);
	add(&message, ": ");
	add(&message, reason(errno));
	return fail(CNI_INTERNAL, words(&message), "");
}

static void explain_no_agent(struct text *message, const struct invocation *call, unsigned patience_ms, int error)
{
	add(message, "unable to connect to Cilium agent: failed to create cilium agent client after ");
	add_number(message, patience_ms / 1000);
	add(message, ".000000 seconds timeout: dial unix ");
	add(message, socket_path(call));
	add(message, ": connect: ");
	add(message, reason(error));
	add(message, "\nIs the agent running?");
}

// What an exchange that brought no answer means to the runtime: `code`, and `again` is what it should do.
static int fail_exchange(const struct invocation *call, enum exchange result, unsigned code, const char *again)
{
	struct text message = { 0 };
	add(&message, "Cilium agent at ");
	add(&message, socket_path(call));
	switch (result) {
	case TOO_LONG:
		add(&message,
		    ": the request is too long for one packet: shorten CNI_ARGS or the network configuration");
		return fail(CNI_INVALID_CONFIG, words(&message), "");
	case NOT_SENT:
		add(&message, ": the request cannot be sent: ");
		add(&message, reason(errno));
		return fail(CNI_INTERNAL, words(&message), "");
	case MALFORMED:
		add(&message, " gave no proper answer: is something else listening there?");
		return fail(CNI_INTERNAL, words(&message), "");
	case TIMED_OUT:
		add(&message, " did not answer in time: ");
		break;
	default:
		add(&message, " went away before it answered: ");
	}
	add(&message, again);
	return fail(code, words(&message), "");
}

static int print_reply(const struct agent_reply *reply)
{
	if (reply->action == RESERVE_PORTS) {
		int error = reserve_ports(reply->ports, reply->ports_length);
		if (error) { // the pod works without, as under Cilium's plugin
			struct text message = { 0 };
			add(&message, "unable to reserve local IP ports: ");
			add(&message, reason(error));
			note("warning", words(&message));
		}
	}
	bool printed = write_all(STDOUT_FILENO, reply->stdout_text, reply->stdout_length);
	return reply->exit_code ? (int)(reply->exit_code & 0xff) : !printed;
}

// Enable IPv6 in the pod as the agent requested; true if it is worth asking again.
static bool ipv6_enabled(void)
{
	struct text message = { 0 };
	int error = enable_ipv6();
	if (!error)
		return true;
	add(&message, "unable to enable ipv6 on all interfaces: ");
	add(&message, reason(error));
	note("warning", words(&message));
	return false;
}

static int fail_delegated_add(const struct delegated *answer)
{
	return fail_delegate(answer, "failed to invoke delegated plugin ADD for IPAM");
}

// An ADD, and what it has been given for it.
struct add_request {
	const struct invocation *call;
	struct agent_request request;
	struct delegated addresses;
	bool ipv6_tried, addressed;
	bool unsettled; // an agent may have made the attachment, though its answer is lost
};

// Carry out the agent's action before the next request; 0, or the exit code of an error that was printed, or -1 when
// there is nothing to be done: then its answer is an error.
static int fulfil(struct add_request *add, const struct agent_reply *reply)
{
	if (reply->action == ENABLE_IPV6 && !add->ipv6_tried) {
		add->ipv6_tried = true;
		return ipv6_enabled() ? 0 : -1;
	}
	if (reply->action != GET_ADDRESSES || add->addressed)
		return -1;
	add->addresses = call_delegate(add->call, "ADD");
	add->addressed = true; // what failed may have taken some of them
	if (add->addresses.exit_code)
		return fail_delegated_add(&add->addresses);
	add->request.flags |= REQUEST_ADDRESSED;
	add->request.addresses = add->addresses.text;
	add->request.addresses_length = add->addresses.length;
	return 0;
}

static int ask_to_add(struct add_request *add)
{
	const struct invocation *call = add->call;
	struct agent_reply reply;
	for (int64_t deadline = now_ms() + ADD_PATIENCE_MS;;) {
		int fd = connect_agent(socket_path(call), deadline);
		enum exchange result = NOT_DELIVERED;
		if (fd >= 0)
			result = ask_agent(fd, &add->request, ANSWER_PATIENCE_MS, &reply);
		if (result == ANSWERED) {
			int code = fulfil(add, &reply);
			if (!code)
				continue;
			add->unsettled = false;
			return code > 0 ? code : print_reply(&reply);
		}
		if (result ==
		    NO_ANSWER) { // it died over the request: the next agent finds what it left, or nothing
			add->request.flags |= REQUEST_REPEATED;
			add->unsettled = true;
		}
		bool died = result == NO_ANSWER || result == NOT_DELIVERED;
		bool over = fd < 0 || now_ms() >= deadline;
		if (!died || (over && add->unsettled)) {
			add->unsettled = true;
			return fail_exchange(call, died ? NO_ANSWER : result, CNI_TRY_AGAIN,
					     "the attachment is in an unknown state; delete it and add it again");
		}
		if (over) {
			struct text message = { 0 };
			explain_no_agent(&message, call, ADD_PATIENCE_MS, errno);
			return fail(CNI_INTERNAL, words(&message), "");
		}
		pause_ms(20); // it died before it answered, or lets its backlog run dry
	}
}

static int do_add(const struct invocation *call)
{
	struct pod_netns netns;
	enum netns_fault fault = open_netns(call->netns, call->netns_override, &netns);
	if (fault != NETNS_OPENED)
		return fail_netns(call, fault);
	struct add_request add = { .call = call,
				   .request = { &netns, call->stdin_text, call->stdin_length,
						REQUEST_RESERVES_PORTS, "", 0 } };
	int code = ask_to_add(&add);
	// Not while a pod may have the address: the runtime's DEL will see to that.
	if (code && add.addressed && !add.unsettled && call_delegate(call, "DEL").exit_code)
		note("warning", "addresses of the delegated plugin may not have been released");
	return code;
}

// The agent is away: leave it the request, and take the interface down here.
static int delete_without_agent(const struct invocation *call, const struct pod_netns *netns)
{
	struct text problem = { 0 };
	const char *mode = chaining_mode(&call->conf);
	if (*mode && !chaining_mode_known(mode)) {
		add(&problem, "invalid chaining-mode ");
		add(&problem, mode);
		return fail(CNI_INTERNAL, words(&problem), "");
	}
	switch (queue_delete(socket_path(call), call->container_id, &problem)) {
	case QUEUE_FAILED: // the endpoint would stay for ever: let the runtime come again
		return fail(CNI_IO_FAILURE, words(&problem), "");
	case QUEUE_FULL:
		note("warning", words(&problem));
		break;
	case QUEUED:
		note("info", "Agent is down: wrote queued deletion file");
	}
	if (netns->netlink < 0 || *mode)
		return 0; // in a chain, the interface belongs to the plugin before us
	int error = delete_link(netns, call->ifname);
	if (error && error != ENODEV) {
		add(&problem, "Unable to delete interface ");
		add(&problem, call->ifname);
		add(&problem, ": ");
		add(&problem, reason(error));
		note("warning", words(&problem));
	}
	return 0;
}

static enum exchange ask_to_delete(const struct invocation *call, const struct pod_netns *netns,
				   unsigned patience_ms, struct agent_reply *reply)
{
	int fd = connect_agent(socket_path(call), now_ms() + patience_ms);
	if (fd < 0)
		return NOT_DELIVERED;
	struct agent_request request = { netns, call->stdin_text, call->stdin_length, 0, "", 0 };
	return ask_agent(fd, &request, ANSWER_PATIENCE_MS, reply);
}

static int detach(const struct invocation *call)
{
	struct pod_netns netns = { -1, -1 };
	struct agent_reply reply;
	struct text problem = { 0 };
	if (*call->netns) {
		enum netns_fault fault = open_netns(call->netns, call->netns_override, &netns);
		if (fault != NETNS_OPENED && fault != NETNS_MISSING)
			return fail_netns(call, fault);
	}
	enum exchange result = ask_to_delete(call, &netns, DEL_PATIENCE_MS, &reply);
	if (result == NOT_DELIVERED || result == NO_ANSWER) { // deleting twice is deleting
		add(&problem, "unable to connect to Cilium agent: failed to acquire deletion queue: ");
		if (lock_queue(socket_path(call), LOCK_PATIENCE_MS, &problem) < 0)
			return fail(CNI_INTERNAL, words(&problem), "");
		result = ask_to_delete(call, &netns, 0, &reply); // the lock lasts until the process ends
		if (result == NOT_DELIVERED || result == NO_ANSWER)
			return delete_without_agent(call, &netns);
	}
	if (result == ANSWERED)
		return print_reply(&reply);
	return fail_exchange(call, result, CNI_TRY_AGAIN, "delete again");
}

static const char *const invoking = "failed to invoke delegated plugin for IPAM";

// The address is released once no link here has it, whether or not the agent runs.
static int do_del(const struct invocation *call)
{
	int code = detach(call);
	if (code || !has_delegate(call))
		return code;
	struct delegated answer = call_delegate(call, "DEL");
	return pass_on_delegate(&answer, invoking);
}

// Commands that may be asked twice without harm. `code` is for an agent that is not there, or silent.
static int inquire(const struct invocation *call, const struct pod_netns *netns, unsigned patience_ms,
		   unsigned code)
{
	struct agent_reply reply;
	struct agent_request request = { netns, call->stdin_text, call->stdin_length, 0, "", 0 };
	for (int64_t deadline = now_ms() + patience_ms;;) {
		int fd = connect_agent(socket_path(call), deadline);
		enum exchange result = NOT_DELIVERED;
		if (fd >= 0)
			result = ask_agent(fd, &request, ANSWER_PATIENCE_MS, &reply);
		if (result == ANSWERED)
			return print_reply(&reply);
		if (result != NOT_DELIVERED && result != NO_ANSWER)
			return fail_exchange(call, result, code, "ask again");
		if (fd < 0 || now_ms() >= deadline) {
			struct text message = { 0 };
			explain_no_agent(&message, call, patience_ms, errno);
			return fail(code, "DaemonDown", words(&message));
		}
		pause_ms(20);
	}
}

// What the agent finds in order may fail the delegated plugin's check (CNI spec 1.1, section 4).
static int inquire_of_both(const struct invocation *call, const struct pod_netns *netns, unsigned patience_ms,
			   unsigned code)
{
	int answered = inquire(call, netns, patience_ms, code);
	if (answered || !has_delegate(call))
		return answered;
	struct delegated answer = call_delegate(call, call->command);
	return pass_on_delegate(&answer, invoking);
}

static int do_check(const struct invocation *call)
{
	struct pod_netns netns;
	enum netns_fault fault = open_netns(call->netns, call->netns_override, &netns);
	if (fault != NETNS_OPENED)
		return fail_netns(call, fault);
	return inquire_of_both(call, &netns, ADD_PATIENCE_MS, CNI_TRY_AGAIN);
}

static const struct pod_netns no_netns = { -1, -1 };

// A runtime asks every few seconds: it wants to know, not to wait.
static int do_status(const struct invocation *call)
{
	return inquire_of_both(call, &no_netns, DEL_PATIENCE_MS, CNI_NOT_AVAILABLE);
}

static int do_gc(const struct invocation *call)
{
	return inquire_of_both(call, &no_netns, DEL_PATIENCE_MS, CNI_TRY_AGAIN);
}

// The commands, and the first version of the protocol that has them.
static const struct command {
	const char *name, *since;
	int (*run)(const struct invocation *call);
} commands[] = {
	{ "ADD", "0.1.0", do_add },	  { "DEL", "0.1.0", do_del }, { "CHECK", "0.4.0", do_check },
	{ "STATUS", "1.1.0", do_status }, { "GC", "1.1.0", do_gc },
};

// Refuse a network configuration with a value of a wrong type, in the words of Cilium's plugin.
static int fail_type(const struct invocation *call)
{
	enum { SHOWN = 1000 }; // bytes of the configuration, so that the reason after them is whole
	struct text conf = { 0 }, message = { 0 };
	bool quoted = strcmp(call->command, "CHECK") && strcmp(call->command, "STATUS");
	add(&conf, call->stdin_text);
	if (conf.length > SHOWN)
		conf.length = SHOWN;
	add(&message, "unable to parse CNI configuration ");
	if (quoted)
		add_json(&message, words(&conf));
	else {
		add(&message, "\"");
		add(&message, words(&conf));
		add(&message, "\"");
	}
	add(&message, ": ");
	add(&message, call->conf.type_fault);
	if (quoted)
		return fail(CNI_INTERNAL, words(&message), "");
	return fail(CNI_INVALID_CONFIG, "InvalidNetworkConfig", words(&message));
}

static int run(const struct invocation *call)
{
	for (size_t i = 0; i < sizeof(commands) / sizeof(*commands); i++) {
		if (strcmp(call->command, commands[i].name))
			continue;
		if (!version_reaches(&call->conf, commands[i].since)) {
			struct text message = { 0 };
			add(&message, "config version does not allow ");
			add(&message, call->command);
			return fail(CNI_INCOMPATIBLE_VERSION, words(&message), "");
		}
		if (check_version(&call->conf))
			return 1;
		return call->conf.type_fault ? fail_type(call) : commands[i].run(call);
	}
	struct text message = { 0 };
	add(&message, "unknown CNI_COMMAND: ");
	add(&message, call->command);
	return fail(CNI_INVALID_ENVIRONMENT, words(&message), "");
}

int main(void)
{
	static struct invocation call;
	const char *command = getenv("CNI_COMMAND");
	if (!command || !*command)
		return print_about();
	if (!strcmp(command, "VERSION"))
		return print_versions();
	int64_t began = now_ms();
	int code = read_invocation(&call, command);
	if (code)
		return code;
	code = run(&call);
	if (call.conf.debug) {
		struct text line = { 0 };
		add(&line, command);
		add(&line, " container ");
		add(&line, call.container_id);
		add(&line, code ? " failed after " : " done after ");
		add_number(&line, now_ms() - began);
		add(&line, " ms");
		note("debug", words(&line));
	}
	return code;
}
