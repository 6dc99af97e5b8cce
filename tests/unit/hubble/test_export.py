"""Exported flow files: lines as recorded, rotation, and the watched configuration."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cells.hubble.codec import from_json, to_json
from cells.hubble.enums import FlowVerdict
from cells.hubble.export.exporters import Exporters, HubbleExportSettings
from cells.hubble.export.files import FlowLog, RotatingFile, parse_flow_logs
from cells.hubble.flow import AgentEvent, DebugEvent, Flow, FlowFilter, HubbleEvent, LostEvent
from cells.hubble.hubble import Hubble
from cells.hubble.observer import FlowObserver, SeenEvent
from cells.hubble.parser import FlowOrigin, Parser
from lifecycle import HealthTree, Hive, config, invoke, module, provide, replace
from lifecycle.testing import eventually, fake
from tests.support.recordings import recordings

DATA = recordings("hubble")
EVENTS = json.loads((DATA / "filters.json").read_text())["events"]
KINDS: dict[str, type[Flow] | type[AgentEvent] | type[DebugEvent] | type[LostEvent]] = {
    "flow": Flow,
    "agent_event": AgentEvent,
    "debug_event": DebugEvent,
    "lost_event": LostEvent,
}


def recorded(name: str) -> list[Any]:
    cases = json.loads((DATA / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


def seen() -> list[SeenEvent]:
    """The events of the recordings: those that are no flows have no time of their own."""
    found = []
    for number, tree in enumerate(EVENTS):
        key = next(key for key in KINDS if key in tree)
        event: HubbleEvent = from_json(KINDS[key], tree[key])
        when = (1_700_000_001 + number - (key != "flow")) * 1_000_000_000 + 123_456_789
        found.append(SeenEvent(event, when, "default/node1"))
    return found


def without_time(tree: dict[str, Any]) -> dict[str, Any]:
    """An event that is not a flow has in the recordings the time at which it was written."""
    return tree if "flow" in tree else {name: value for name, value in tree.items() if name != "time"}


@pytest.mark.parametrize("case", recorded("exporter"))
def test_events_are_written_as_recorded(case: dict[str, Any]) -> None:
    log = FlowLog(
        "test",
        "/x",
        tuple(case["field_mask"] or ()),
        tuple(from_json(FlowFilter, tree) for tree in case["allow"]),
        tuple(from_json(FlowFilter, tree) for tree in case["deny"]),
    )
    if "error" in case:
        with pytest.raises(ValueError, match="test: "):
            log.check()
        return
    lines = [line for line in map(log.check().line, seen()) if line]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert [without_time(json.loads(line)) for line in lines] == list(map(without_time, case["lines"]))


@pytest.mark.parametrize("case", recorded("flowlogs"))
def test_flow_logs_are_read_as_recorded(case: dict[str, Any]) -> None:
    if not case["accepted"]:
        with pytest.raises(ValueError, match=r"\S"):
            parse_flow_logs(case["file"])
        return
    found = [
        {
            "name": one.name,
            "file_path": one.path,
            "field_mask": list(one.field_mask) or None,
            "include": [to_json(each) for each in one.include] or None,
            "exclude": [to_json(each) for each in one.exclude] or None,
        }
        for one in parse_flow_logs(case["file"])
    ]
    expected = [
        {name: value for name, value in one.items() if name != "end"} for one in case["flow_logs"] or []
    ]
    assert found == expected
    ends = [one.end for one in parse_flow_logs(case["file"])]
    assert [end is not None for end in ends] == ["end" in one for one in case["flow_logs"] or []]


ENTRY = "flowLogs:\n- name: a\n  filePath: /a\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ENTRY + "  end: 2023-10-09T23:59:59\n", "not RFC 3339"),
        (ENTRY + "  end: 2023-10-09 23:59:59\n", "not RFC 3339"),
        (ENTRY + "  end: 5\n", "not RFC 3339"),
        (ENTRY + "  fieldMask: time\n", "fieldMask: expected a list"),
        (ENTRY + "  excludeFilters: {}\n", "excludeFilters: expected a list"),
        ("flowLogs:\n- name: [a]\n  filePath: /a\n", "expected a text"),
    ],
)
def test_a_flow_log_that_cilium_refuses_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_flow_logs(text)


def test_flow_logs_are_read_as_json_is_in_go() -> None:
    """Keys match in any case, numbers and booleans are texts, and only the first document counts."""
    text = "flowlogs:\n- Name: true\n  FilePath: 5\n  END: 2023-10-09T23:59:59.5Z\n---\nflowLogs: nonsense\n"
    assert parse_flow_logs(text) == [FlowLog("true", "5", end=1_696_895_999_500_000_000)]


def test_a_full_file_is_renamed_and_the_newest_stay(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "logs" / "events.log", size=100, backups=2, compress=False)
    for number in range(40):
        file.write([b"%03d\n" % number] * 5)  # twenty bytes
    file.close()
    retained = file.backups()
    assert len(retained) == 2
    assert all(one.stat().st_size == 100 for one in retained)
    texts = b"".join(one.read_bytes() for one in [*retained, tmp_path / "logs" / "events.log"])
    assert texts == b"".join(b"%03d\n" % number * 5 for number in range(25, 40))
    assert (tmp_path / "logs" / "events.log").stat().st_mode & 0o777 == 0o600


def test_renamed_files_are_compressed_and_appending_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(b"x" * 99 + b"\n")
    file = RotatingFile(path, size=100, backups=0, compress=True)
    file.write([b"next\n"])
    file.close()
    (backup,) = file.backups()
    assert gzip.decompress(backup.read_bytes()) == b"x" * 99 + b"\n"
    assert path.read_bytes() == b"next\n"


@pytest.mark.parametrize("compress", [False, True])
def test_backups_and_the_new_file_keep_mode_and_owner(tmp_path: Path, *, compress: bool) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(b"x" * 99 + b"\n")
    path.chmod(0o640)
    file = RotatingFile(path, size=100, backups=0, compress=compress)
    file.write([b"next\n"])
    file.close()
    (backup,) = file.backups()
    assert backup.suffix == (".gz" if compress else ".log")
    found = [each.stat() for each in (path, backup)]
    assert [(each.st_mode & 0o777, each.st_uid) for each in found] == [(0o640, os.geteuid())] * 2
    assert sorted(tmp_path.iterdir()) == sorted([path, backup])


def test_backups_of_an_earlier_process_are_compressed_and_limited(tmp_path: Path) -> None:
    stamps = [f"events-2023-11-14T22-13-2{number}.000.log" for number in range(4)]
    for name in stamps:
        (tmp_path / name).write_bytes(b"old\n")
    (tmp_path / f"{stamps[3]}.gz").write_bytes(b"half")  # the agent ended while it compressed
    file = RotatingFile(tmp_path / "events.log", size=100, backups=2, compress=True)
    file.write([b"one\n"])
    file.close()
    assert [each.name for each in file.backups()] == [f"{name}.gz" for name in stamps[2:]]
    assert [gzip.decompress(each.read_bytes()) for each in file.backups()] == [b"old\n"] * 2


@asynccontextmanager
async def exporting(flows: FlowObserver, **settings: object) -> AsyncIterator[Hive]:
    hubble = fake(Hubble, observer=flows)
    hive = Hive(
        module(
            "hubble",
            "Files of events",
            config(HubbleExportSettings),
            provide(Exporters),
            invoke(Exporters),
            replace(Hubble, hubble),
        ),
        settings=settings,
    )
    async with hive.started():
        yield hive


def observer() -> FlowObserver:
    origin = FlowOrigin(node_name="default/n1")
    return FlowObserver(7, origin, Parser(origin), "cilium v1.17.0")


def add(flows: FlowObserver, uuid: str, verdict: FlowVerdict = FlowVerdict.FORWARDED) -> None:
    when = 1_700_000_000_000_000_000
    flows.add_event(Flow(time=when, uuid=uuid, verdict=verdict, node_name="default/n1"), when)


def uuids(path: Path) -> list[str]:
    return (
        [json.loads(line)["flow"]["uuid"] for line in path.read_text().splitlines()] if path.exists() else []
    )


@pytest.mark.anyio
async def test_flows_are_written_to_the_file_of_the_settings(tmp_path: Path) -> None:
    flows, path = observer(), tmp_path / "events.log"
    settings = {
        "hubble-export-file-path": str(path),
        "hubble-export-allowlist": '{"verdict":["DROPPED"]} {"verdict": ["ERROR"]}',
        "hubble-export-fieldmask": "uuid verdict",
    }
    async with exporting(flows, **settings):

        def written() -> bool:
            add(flows, "passed")
            add(flows, "dropped", FlowVerdict.DROPPED)
            return bool(uuids(path))

        await eventually(written)
    assert set(uuids(path)) == {"dropped"}


@pytest.mark.anyio
@pytest.mark.parametrize(("size", "limit"), [("0", 100), ("1", 1)])
async def test_a_file_is_renamed_at_the_size_of_the_setting_with_0_for_100_mib(
    tmp_path: Path, size: str, limit: int
) -> None:
    """As in lumberjack."""
    flows, path = observer(), tmp_path / "events.log"
    path.touch()
    os.truncate(path, (limit << 20) - 1)
    settings = {"hubble-export-file-path": str(path), "hubble-export-file-max-size-mb": size}
    async with exporting(flows, **settings):

        def renamed() -> list[int]:
            add(flows, "one")
            return [one.stat().st_size for one in tmp_path.iterdir() if one != path]

        await eventually(renamed)
        await eventually(lambda: "one" in uuids(path))
        assert renamed() == [(limit << 20) - 1]


@pytest.mark.anyio
async def test_the_watched_file_begins_and_ends_flow_logs(tmp_path: Path) -> None:
    flows, file = observer(), tmp_path / "flowlogs.yaml"

    def use(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(file)

    def entry(name: str, more: str = "") -> str:
        return f"- name: {name}\n  filePath: {tmp_path}/{name}.log\n{more}"

    def goes_to(uuid: str, *names: str) -> bool:
        add(flows, uuid)
        return all(uuid in uuids(tmp_path / f"{name}.log") for name in names)

    use("flowLogs: []")
    async with exporting(flows, **{"hubble-flowlogs-config-path": str(file)}) as hive:
        exporters = hive.get(Exporters)
        use("flowLogs:\n" + entry("a") + entry("old", '  end: "2020-01-01T00:00:00Z"\n'))
        await eventually(lambda: exporters.active == {"a": True, "old": False})
        await eventually(lambda: goes_to("one", "a"))
        use("flowLogs:\n" + entry("a") + entry("b"))
        await eventually(lambda: goes_to("two", "a", "b"))
        use("flowLogs: nonsense")
        degraded = "flow logs stay as they were"
        await eventually(lambda: any(degraded in one.message for one in hive.get(HealthTree).snapshot()))
        assert goes_to("three") or exporters.active == {"a": True, "b": True}
        use("flowLogs:\n" + entry("b"))
        await eventually(lambda: exporters.active == {"b": True})
        assert exporters.reconfigurations == {"add": 3, "remove": 2, "failure": 1}


@pytest.mark.anyio
async def test_an_invalid_flow_log_leaves_the_others_of_its_file_in_force(tmp_path: Path) -> None:
    flows, file = observer(), tmp_path / "flowlogs.yaml"

    def entry(name: str, more: str = "") -> str:
        return f"- {{name: {name}, filePath: {tmp_path}/{name}.log{more}}}\n"

    def use(*entries: str) -> None:
        (tmp_path / "new").write_text("flowLogs:\n" + "".join(entries))
        (tmp_path / "new").replace(file)

    use(entry("a"), entry("c"))
    async with exporting(flows, **{"hubble-flowlogs-config-path": str(file)}) as hive:
        exporters = hive.get(Exporters)

        def messages() -> str:
            return " ".join(one.message for one in hive.get(HealthTree).snapshot())

        await eventually(lambda: exporters.active == {"a": True, "c": True})
        regex = ', includeFilters: [{dns_query: ["("]}]'
        use(entry("a", ", fieldMask: [nope]"), entry("b"), entry("new", regex))
        await eventually(lambda: exporters.active == {"a": True, "b": True})
        assert exporters.reconfigurations == {"add": 3, "remove": 1}
        assert "a: the field mask has 'nope'" in messages()
        assert "new: " in messages()

        def written() -> bool:
            add(flows, "one")
            return "one" in uuids(tmp_path / "a.log") and "one" in uuids(tmp_path / "b.log")

        await eventually(written)
        use(entry("a"), entry("b"))
        await eventually(lambda: "2 of 2 flow logs are written" in messages())


@pytest.mark.anyio
async def test_events_that_cannot_be_written_wait_until_they_can(tmp_path: Path) -> None:
    flows, blocked, file = observer(), tmp_path / "blocked", tmp_path / "flowlogs.yaml"
    blocked.write_text("a file where a folder should be")
    file.write_text(f"flowLogs:\n- name: a\n  filePath: {blocked}/a.log\n")
    settings = {
        "hubble-export-file-path": f"{blocked}/events.log",
        "hubble-flowlogs-config-path": str(file),
    }
    async with exporting(flows, **settings) as hive:

        def messages() -> str:
            return " ".join(one.message for one in hive.get(HealthTree).snapshot())

        await eventually(lambda: hive.get(Exporters).active == {"a": True})

        def refused() -> bool:
            add(flows, "one")
            return f"hubble-export: {blocked}/events.log: File exists" in messages()

        await eventually(refused)
        waiting = flows.ring.end
        blocked.unlink()
        await eventually(lambda: "one" in uuids(blocked / "events.log") and "one" in uuids(blocked / "a.log"))
        await eventually(lambda: "1 of 1 flow logs are written" in messages())
        await eventually(lambda: len(uuids(blocked / "events.log")) >= min(waiting, flows.ring.capacity))


@pytest.mark.anyio
async def test_another_order_of_fields_and_filters_changes_no_flow_log(tmp_path: Path) -> None:
    flows, file = observer(), tmp_path / "flowlogs.yaml"
    entry = f"- name: a\n  filePath: {tmp_path}/a.log\n  fieldMask: [%s]\n  includeFilters: [%s]\n"
    other = f"- name: b\n  filePath: {tmp_path}/b.log\n"
    one, two = "verdict: [DROPPED]", "uuid: [x]"
    file.write_text("flowLogs:\n" + entry % ("time, uuid", f"{{{one}}}, {{{two}}}"))
    async with exporting(flows, **{"hubble-flowlogs-config-path": str(file)}) as hive:
        exporters = hive.get(Exporters)
        await eventually(lambda: exporters.active == {"a": True})
        file.write_text("flowLogs:\n" + entry % ("uuid, time", f"{{{two}}}, {{{one}}}") + other)
        await eventually(lambda: exporters.active == {"a": True, "b": True})
        assert exporters.reconfigurations == {"add": 2}


@pytest.mark.anyio
async def test_flow_logs_follow_their_file_in_a_replaced_directory(tmp_path: Path) -> None:
    flows, directory, fresh = observer(), tmp_path / "config", tmp_path / "fresh"
    entry = f"flowLogs:\n- name: %s\n  filePath: {tmp_path}/a.log\n"
    for each, name in ((directory, "a"), (fresh, "b")):
        each.mkdir()
        (each / "flowlogs.yaml").write_text(entry % name)
    file = directory / "flowlogs.yaml"
    async with exporting(flows, **{"hubble-flowlogs-config-path": str(file)}) as hive:
        exporters = hive.get(Exporters)
        await eventually(lambda: exporters.active == {"a": True})
        directory.rename(tmp_path / "old")
        fresh.rename(directory)
        await eventually(lambda: exporters.active == {"b": True})
        file.write_text(entry % "c")
        await eventually(lambda: exporters.active == {"c": True})


@pytest.mark.parametrize("truncated", [False, True])
def test_a_line_that_did_not_fit_is_not_written_in_part(tmp_path: Path, *, truncated: bool) -> None:
    file = RotatingFile(tmp_path / "events.log", size=1 << 20, backups=0, compress=False)
    file.write([b"one\n"])
    if truncated:  # by a process that makes room, as logrotate's copytruncate does
        os.truncate(tmp_path / "events.log", 0)
    there = b"" if truncated else b"one\n"
    lines = [b"x" * 4095 + b"\n"] * 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
        with pytest.raises(OSError, match="File too large"):
            file.write(lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "events.log").read_bytes() == there
    file.write(lines)
    file.close()
    assert (tmp_path / "events.log").stat().st_size == len(there) + 2 * 4096
    assert lines == []


def test_an_invalid_export_filter_is_refused() -> None:
    with pytest.raises(ValueError, match="hubble-export-allowlist: unknown field 'nope'"):
        HubbleExportSettings(hubble_export_allowlist='{"nope":[]}').validate()
    with pytest.raises(ValueError, match="the field mask has 'nope'"):
        HubbleExportSettings(hubble_export_fieldmask=("nope",)).validate()
