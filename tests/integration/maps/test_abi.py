"""Map records and flags in Python match the C code, as the compiler confirms."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

import pytest

from cells.datapath.build import FLAGS, SOURCES, arch_headers, find_clang
from cells.maps.records import LAYOUTS, Layout, endpoints, flows
from cells.maps.records.endpoints import ENDPOINT_FLAGS, NODE_EVENTS

HEADERS = (
    *("lib/maps.h", "overlay/maps.h", "nat/maps.h", "netdev/maps.h", "nodeport/maps.h"),
    *("lb/skip.h", "sock/maps.h", "netdev/announce.h"),
)
NOT_RECORDS = {"address", "nat_entry", "ipmasq4_key", "ipmasq6_key"}
"""Parts of others, forms of others, and prefixes, which the kernel lays out."""


def headers() -> str:
    """What the headers with layouts say."""
    return "\n".join((SOURCES / name).read_text(encoding="utf-8") for name in HEADERS)


def compiled(code: str) -> str:
    """The compiler's output for the code, with the datapath's layouts; empty without errors."""
    command = [find_clang(), *FLAGS, f"-I{arch_headers()}", f"-I{SOURCES}", "-fsyntax-only", "-x", "c", "-"]
    source = "\n".join([*(f'#include "{name}"' for name in HEADERS), code])
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr


def claims(layout: Layout) -> list[str]:
    """The definition of the C struct in Python."""
    name = f"struct {layout.name}"
    offsets = {member: at for member, at in layout.offsets.items() if not member.startswith("_")}
    return [
        f'_Static_assert(sizeof({name}) == {layout.size}, "size of {layout.name}");',
        *(
            f'_Static_assert(__builtin_offsetof({name}, {member}) == {at}, "{layout.name}.{member}");'
            for member, at in offsets.items()
        ),
    ]


def test_sizes_and_offsets_are_those_of_the_c_structs() -> None:
    assert compiled("\n".join(line for layout in LAYOUTS for line in claims(layout))) == ""


def test_a_wrong_offset_is_detected() -> None:
    wrong = Layout("address_key", ip="16s", key="B", family="B", cluster_id="H")
    LAYOUTS.remove(wrong)
    spoken = compiled("\n".join(claims(wrong)))
    assert "address_key.key" in spoken
    assert "address_key.family" in spoken


def test_every_struct_of_a_map_has_its_record() -> None:
    structs = set(re.findall(r"^struct (\w+) \{", headers(), re.MULTILINE))
    assert structs - NOT_RECORDS == {layout.name for layout in LAYOUTS}


@pytest.mark.parametrize(
    ("prefix", "words"),
    [("ENDPOINT_", ENDPOINT_FLAGS), ("NODE_(?:NOTIFY|AUDITS|CIDR)_", NODE_EVENTS), ("DEVICE_", None)],
)
def test_every_flag_has_its_number_and_its_words(prefix: str, words: Mapping[int, str] | None) -> None:
    defined = re.findall(rf"^#define ({prefix}\w+) (\d+)", headers(), re.MULTILINE)
    numbers = {**vars(endpoints), **vars(flows)}
    assert {name: int(number) for name, number in defined} == {name: numbers[name] for name, _ in defined}
    assert words is None or {int(number) for _, number in defined} == words.keys()
