"""The table of programs: one for each attach point and entry, equal to the C code."""

import re

from cells.datapath.build import SOURCES
from cells.datapath.programs import DISPATCHERS, ENTRIES, PROGRAMS, DeviceKind, at, pod_link


def test_the_c_source_has_the_same_programs_and_entries() -> None:
    header = (SOURCES / "lib" / "maps.h").read_text(encoding="ascii")
    numbers = {name: int(n) for name, n in re.findall(r"#define (ENTRY_\w+) (\d+)", header)}
    dispatch = (SOURCES / "dispatch.c").read_text(encoding="ascii")
    jumps = re.findall(
        r"int (cil_\w+)\(.*?\{.*?bpf_tail_call\(skb, &hive_entry, (ENTRY_\w+)\)", dispatch, re.DOTALL
    )
    assert {name: numbers[entry] for name, entry in jumps} == {
        program.dispatcher: program.entry for program in PROGRAMS if program.dispatcher
    }
    programs = re.findall(r'SEC\("tc"\)\nint (\w+)\(', (SOURCES / "datapath.c").read_text(encoding="ascii"))
    assert set(programs) == ENTRIES.keys()
    (room,) = re.findall(r"#define ENTRIES (\d+)", header)
    assert max(ENTRIES.values()) < int(room)


def test_no_two_programs_share_a_slot() -> None:
    assert len(set(ENTRIES.values())) == len(PROGRAMS)
    assert len(set(DISPATCHERS)) == len(DISPATCHERS)
    points = [point for program in PROGRAMS for point in program.attached]
    assert len(set(points)) == len(points)


def test_each_kind_of_device_has_its_programs() -> None:
    assert at(pod_link(egress_prog=False)) == ("cil_from_container", "")
    assert at(pod_link(egress_prog=True)) == ("cil_from_container", "cil_to_container")
    assert at(DeviceKind.HOST_LINK) == ("cil_to_host", "cil_from_host")
    assert at(DeviceKind.NET_LINK) == ("cil_to_host", "")
