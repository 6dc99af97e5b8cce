"""Replays a recorded scenario on the fake API server, exchange by exchange."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.apiserver import ApiServer, User
from tests.support.recordings import recordings
from tests.unit.apiserver.comparison import Bound, differences
from tests.unit.apiserver.wire_client import Received, Sent, Stream, exchange, target

RECORDINGS = recordings("kubernetes")
ACCOUNT = ("system:serviceaccounts", "system:serviceaccounts:kube-system")
USERS = {
    "admin": User("kubernetes-admin", ("system:masters",)),
    "agent": User("system:serviceaccount:kube-system:cilium", ACCOUNT),
    "operator": User("system:serviceaccount:kube-system:cilium-operator", ACCOUNT),
    "nodea": User("system:node:node-a", ("system:nodes",)),
    "nobody": User("nobody-special", ()),
    "throttled": User("throttled-user", ()),
    "queued": User("queued-user", ()),
}
LONGEST = 12.0
"""Seconds a replayed watch may last: longer ones are excluded."""
_ABRIDGED = re.compile(r'"\$elided(?!: \d+ times)')
PROTOBUF = "application/vnd.kubernetes.protobuf"


class Result(NamedTuple):
    """The result of one exchange."""

    id: int
    outcome: str
    """``same``, ``different`` or ``excluded``."""
    why: str = ""


class Scenario:
    """One recording."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recorded: dict[str, Any] = json.loads(path.read_bytes())

    @property
    def name(self) -> str:
        """Return the scenario's name."""
        return str(self.recorded["name"])

    def excluded(self) -> str:
        """Return why the whole scenario is excluded, by the features it needs; empty if it is not."""
        profile = self.recorded["profile"]
        if profile == "full":
            return "needs the controllers of a whole cluster"
        if profile in {"restart", "tiny-inflight"}:
            return "its server is stopped, starved or restarted by hand; tested in test_restart"
        if self.recorded["group"] == "limits" and any(
            "another request" in step.get("action", "") for step in self.steps
        ):
            return "needs another client at the same time"
        return ""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return its exchanges and actions."""
        return list(self.recorded["exchanges"])


def _has_rules(value: Any) -> bool:
    if isinstance(value, dict):
        return "x-kubernetes-validations" in value or any(map(_has_rules, value.values()))
    return isinstance(value, list) and any(map(_has_rules, value))


def left_out(step: dict[str, Any]) -> str:
    """Return why an exchange is excluded, by a feature that the fake lacks; empty if it is not."""
    request, response = step["request"], step.get("response") or {}
    sent = {name.lower(): str(value) for name, value in (request.get("headers") or {}).items()}
    got = {name.lower(): str(value) for name, value in (response.get("headers") or {}).items()}
    path = str(request.get("path") or request.get("raw_target", ""))
    for lacks, feature in (
        (PROTOBUF in got.get("content-type", "") + sent.get("content-type", ""), "protobuf"),
        (
            "yaml" in sent.get("content-type", "") + sent.get("accept", ""),
            "YAML, and who owns what is applied",
        ),
        ("timeout" in (request.get("query") or {}), "deadlines of requests"),
        ("as=" in sent.get("accept", ""), "tables, metadata alone, discovery all at once"),
        (path.startswith("/openapi") or path == "/", "OpenAPI documents whole"),
        (re.search(r"^/api/v1(/.*)?/events|^/api/v1$", path), "events of core/v1"),
        ("/watch/" in path, "the older path of watches"),
        ("verbose" in str(request.get("query")) or path.count("/healthz/"), "health of parts"),
        (path.startswith(("/healthz/", "/livez/", "/readyz/")), "health of parts"),
        (re.search(r"\.k8s\.io/v1/.*reviews|/(eviction|binding|token)$", path), "reviews, eviction, tokens"),
        (re.search(r"/pods/[^/]+/(log|exec|attach|portforward|proxy)$", path), "a kubelet"),
        ("/apiservices" in path or "/servicecidrs" in path, "objects of the server itself"),
        ("impersonate-user" in sent or "impersonate-group" in sent, "rights to impersonate"),
        ("<TOKEN:nodea>" in sent.get("authorization", ""), "the node authorizer"),
        (re.search("<JWT", sent.get("authorization", "")), "tokens of service accounts"),
        ("escalat" in json.dumps(step.get("note") or "") or _escalates(response), "privilege escalation"),
        (request.get("client_certificate"), "client certificates of the recording"),
        (_has_rules(request.get("body")) and response.get("status") == 422, "CEL"),
    ):
        if lacks:
            return f"lacks {feature}"
    end = (step.get("end") or {}).get("seconds_after_start", 0)
    if end > LONGEST:
        return f"takes {end} s"
    if "polled" in str(step.get("note")) and response.get("status") in {404, 429}:
        return "one of the answers while a definition comes into force, which may be left out"
    if _ABRIDGED.search(json.dumps(request)) or "body_elided" in request:
        return "the recording does not have the bytes that were sent"
    return ""


def _escalates(response: dict[str, Any]) -> bool:
    return "attempting to grant" in json.dumps(response.get("body") or "")


async def replay(scenario: Scenario) -> list[Result]:
    """Replay the scenario on a new server."""
    dual = scenario.recorded["profile"] != "single-stack"
    tokens = {f"token-{name}": user for name, user in USERS.items()}
    server = ApiServer(tokens, dual_stack=dual)
    bound = Bound({name: f"token-{name}" for name in USERS})
    async with server.serving() as url:
        player = _Player(server, url, bound)
        try:
            await player.prepare(scenario.recorded.get("requires") or ())
            return await player.play(scenario)
        finally:
            await player.close()


def unhurried(step: dict[str, Any]) -> dict[str, Any]:
    """Return a watch's request, with three times the timeout if it ends after later exchanges."""
    request = dict(step["request"])
    seconds = (request.get("query") or {}).get("timeoutSeconds")
    if seconds is not None and (step.get("end") or {}).get("after", 0) > step["id"]:
        request["query"] = {**request["query"], "timeoutSeconds": str(3 * int(seconds))}
    return request


class _Player:
    def __init__(self, server: ApiServer, url: str, bound: Bound) -> None:
        self._server = server
        self._url = url
        self._bound = bound
        self._watches: list[tuple[dict[str, Any], Stream]] = []
        self._checked: dict[int, int] = {}
        self._bad: dict[int, str] = {}
        self._rules = False
        self._ruled = False
        self._at: dict[int, int] = {}

    async def close(self) -> None:
        for _, stream in self._watches:
            await stream.close()

    async def prepare(self, needed: Sequence[str]) -> None:
        """Create the definitions that a scenario needs."""
        for one in needed:
            body = json.loads((RECORDINGS / "fixtures" / f"{one.replace(':', '_')}.json").read_bytes())
            body = body.get("body", body)
            self._rules = self._rules or _has_rules(body)
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            answer = await self._send("POST", path, body)
            assert answer is not None, one
            assert answer.status == 201, answer.body
            spec = body["spec"]
            for version in spec["versions"]:
                if version.get("served"):
                    await self._until(
                        f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}", 200
                    )

    async def _send(self, method: str, path: str, body: Any = None) -> Received | None:
        headers = [("Authorization", "Bearer token-admin"), ("Content-Type", "application/json")]
        data = json.dumps(body).encode() if body is not None else b""
        return await exchange(self._url, Sent(method, path, headers, data))

    async def _until(self, path: str, status: int) -> None:
        async with asyncio.timeout(30):
            while (answer := await self._send("GET", path)) is None or answer.status != status:  # noqa: ASYNC110  # the server has no event for it
                await asyncio.sleep(0.01)

    async def play(self, scenario: Scenario) -> list[Result]:
        results = []
        steps = scenario.steps
        for number, step in enumerate(steps):
            if "request" not in step:
                await self._act(step)
                continue
            self._rules = self._rules or _has_rules(step["request"].get("body"))
            if reason := left_out(step) or self._by_rules(step):
                results.append(Result(step["id"], "excluded", reason))
                if not step.get("watch") and step["request"].get("method") != "GET":
                    # What follows may need what it does: without it the scenario ends here.
                    wrong = await self._one(step)
                    done = (step.get("response") or {}).get("status", 400) < 300
                    if done and ("status: " in str(wrong) or "applied" in reason):
                        results += [
                            Result(one["id"], "excluded", f"follows what {reason}")
                            for one in steps[number + 1 :]
                            if "request" in one
                        ]
                        break
            else:
                wrong = await self._one(step)
                results.append(Result(step["id"], "different" if wrong else "same", "; ".join(wrong)))
            following = steps[number + 1]["id"] if number + 1 < len(steps) else step["id"] + 1
            await self._settle(following - 1)
        bad = self._bad
        return [
            one._replace(outcome="different", why=f"{one.why} {bad[one.id]}")
            if one.id in bad and one.outcome == "same"
            else one
            for one in results
        ]

    def _by_rules(self, step: dict[str, Any]) -> str:
        response = step.get("response") or {}
        written = step["request"].get("method") in {"POST", "PUT", "PATCH"}
        if self._rules and written and response.get("status") == 422:
            self._ruled = True
        return "CEL rules are not evaluated" if self._ruled else ""

    async def _act(self, step: dict[str, Any]) -> None:
        if "poll" in step:
            await self._until(step["poll"]["path"], step["poll"]["status"])
        else:
            await asyncio.sleep(min(step.get("sleep", 0.3), 0.3))

    async def _one(self, step: dict[str, Any]) -> list[str]:
        if step.get("watch"):
            return await self._watch(step, self._request(unhurried(step)))
        sent = self._request(step["request"])
        recorded = step.get("response") or {}
        answer = await exchange(self._url, sent)
        wanted = recorded.get("status")
        polled = step.get("polled") or wanted == 200
        async with asyncio.timeout(30):
            while answer is not None and answer.status == 429 and wanted != 429 and polled:
                await asyncio.sleep(0.01)
                answer = await exchange(self._url, sent)
            while (
                answer is not None and step.get("polled") and answer.status != wanted and wanted in {200, 404}
            ):
                await asyncio.sleep(0.01)
                answer = await exchange(self._url, sent)
        return self._compare(recorded, answer)

    def _request(self, recorded: dict[str, Any]) -> Sent:
        fill = self._bound.fill
        headers = []
        for name, value in (recorded.get("headers") or {}).items():
            headers += [(name, fill(one)) for one in (value if isinstance(value, list) else [value])]
        if "body" in recorded:
            body = json.dumps(fill(recorded["body"])).encode()
        else:
            body = str(fill(recorded.get("body_text", ""))).encode()
        where = recorded.get("raw_target") or target(recorded["path"], fill(recorded.get("query") or {}))
        version = recorded.get("http_version", "HTTP/1.1")
        version = version if version.startswith("HTTP/") else f"HTTP/{version}"
        return Sent(recorded["method"], fill(where), headers, body, version)

    def _compare(self, recorded: dict[str, Any], answer: Received | None) -> list[str]:
        if answer is None:
            return [] if "without a response" in str(recorded.get("connection")) else ["the server hung up"]
        if "status" not in recorded:
            return [f"recorded {recorded.get('connection')}, got {answer.status}"]
        found = []
        if answer.status != recorded["status"]:
            found.append(f"status: recorded {recorded['status']}, got {answer.status} {answer.body[:300]!r}")
            return found
        found += self._compare_headers(recorded.get("headers") or {}, answer)
        if "body" in recorded:
            try:
                body = answer.json
            except ValueError:
                return [*found, f"body is no JSON: {answer.body[:200]!r}"]
            wanted = recorded["body"]
            if recorded.get("body_elided"):
                if "items" not in wanted or "resourceVersion" not in wanted["metadata"]:
                    return found
                wanted = {"$elided": True, **wanted}
            return found + differences(wanted, body, self._bound)
        if "body_text" in recorded and not self._bound.text(recorded["body_text"], answer.body.decode()):
            found.append(f"text: recorded {recorded['body_text'][:300]!r}, got {answer.body[:300]!r}")
        return found

    def _compare_headers(self, recorded: dict[str, Any], answer: Received) -> list[str]:
        found = []
        for name in ("Content-Type", "Retry-After", "Content-Encoding"):
            wanted, got = recorded.get(name), answer.headers.get(name.lower())
            if wanted is not None and wanted != got:
                found.append(f"header {name}: recorded {wanted!r}, got {got!r}")
        unknown = "unknown field" in str(recorded.get("Warning"))
        if answer.status < 300 and unknown is not ("warning" in answer.headers):
            found.append(
                f"warnings: recorded {recorded.get('Warning')!r}, got {answer.headers.get('warning')!r}"
            )
        return found

    async def _watch(self, step: dict[str, Any], sent: Sent) -> list[str]:
        stream = Stream(self._url, sent)
        await stream.started()
        answer = stream.answer
        recorded = step.get("response") or {}
        if answer is None:
            return ["the server hung up"]
        if answer.status != recorded.get("status"):
            return [f"status: recorded {recorded.get('status')}, got {answer.status} {answer.body[:300]!r}"]
        self._watches.append((step, stream))
        return []

    async def _settle(self, after: int) -> None:
        """Wait until every watch has sent its events before the next exchange, and ended if it should."""
        for step, stream in list(self._watches):
            wanted = [line for line in step.get("stream", []) if line["after"] <= after]
            await self._reported(step, stream, wanted)
            end = step.get("end") or {}
            if end.get("after", 10**9) <= after:
                if end["how"].startswith("closed by the client"):
                    await stream.close()
                elif not await stream.over():
                    self._bad[step["id"]] = f"the stream did not end: {end['how']}"
                elif ("last chunk" in end["how"]) is not (stream.ended == "last chunk"):
                    self._bad[step["id"]] = f"recorded end {end['how']}, got {stream.ended}"
                self._watches.remove((step, stream))
                await stream.close()

    async def _reported(self, step: dict[str, Any], stream: Stream, wanted: list[dict[str, Any]]) -> None:
        at = self._checked.get(step["id"], 0)
        position = self._positions.get(step["id"], 0)
        while at < len(wanted):
            recorded = wanted[at]["event"]
            if recorded is None:
                at += 1
                continue
            if not await stream.until(position + 1):
                self._bad.setdefault(step["id"], f"event {at} did not come: {json.dumps(recorded)[:200]}")
                break
            got = stream.events[position]
            position += 1
            if got["type"] == "BOOKMARK" and recorded["type"] != "BOOKMARK":
                continue
            wrong = differences(recorded, got, self._bound)
            while wrong and got["type"] == "BOOKMARK" and await stream.until(position + 1):
                # One that came before what was to come first, as this machine was busy: another follows.
                got = stream.events[position]
                position += 1
                wrong = differences(recorded, got, self._bound)
            if wrong:
                self._bad.setdefault(step["id"], f"event {at}: {'; '.join(wrong)}")
            at += 1
        self._checked[step["id"]], self._positions[step["id"]] = at, position

    @property
    def _positions(self) -> dict[int, int]:
        return self._at


def scenarios() -> list[Scenario]:
    """Return all recordings."""
    return [Scenario(path) for path in sorted(RECORDINGS.glob("*.json")) if path.name != "index.json"]
