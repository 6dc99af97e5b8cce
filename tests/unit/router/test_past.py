"""The router's earlier addresses: the device's, and those recorded by another version's agent."""

from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from cells.maps.records.endpoints import NodeConfig
from cells.node.router import addresses_in, previous_addresses

ROUTER, ROUTER6 = IPv4Address("10.0.1.5"), IPv6Address("fd00:1::a:5")
V6 = "0xfd, 0x0, 0x0, 0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0xa, 0x0, 0x5"
V4 = "0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0xff, 0xff, 0xa, 0x0, 0x1, 0x5"
WRITTEN = f"""/*
 cilium.v6.external.str 2001:db8::1
 cilium.v6.internal.str fd00:1::a:5
 cilium.v4.external.str 192.0.2.1
 cilium.v4.internal.str 10.0.1.5

 cilium.v6.internal.raw {V6}
 cilium.v4.internal.raw {V4}
 */
#define ENABLE_IPV4 1
"""


def test_the_marker_lines_are_read() -> None:
    assert addresses_in(WRITTEN) == [ROUTER6, ROUTER]


def test_the_defines_of_old_are_read() -> None:
    text = f"#define IPV4_GATEWAY 0x501000a\n#define ROUTER_IP {V6}\n"
    assert addresses_in(text) == [ROUTER6, ROUTER]


@pytest.mark.parametrize(
    "line",
    [
        "",
        " cilium.v4.internal.raw ",
        " cilium.v6.internal.raw 0xfd, 0x0",
        f" cilium.v4.internal.raw {V4}, 0x1",
        f" cilium.v6.internal.raw {', '.join(['0x0'] * 16)}",
        "#define IPV4_GATEWAY 0x0",
        "#define IPV4_GATEWAY gateway",
    ],
)
def test_lines_that_make_no_sense_are_passed_over(line: str) -> None:
    assert addresses_in(line) == []


def test_what_the_programs_know_comes_before_the_device_and_the_file_is_left_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "node_config.h"
    path.write_text(WRITTEN, encoding="ascii")
    pinned, now = IPv4Address("10.0.1.8"), IPv4Address("10.0.1.9")
    node = NodeConfig(pinned, 2, bytes(6), 3, bytes(6), None)
    log = structlog.get_logger()
    assert previous_addresses(node, [now, ROUTER6], path, log) == [pinned, now, ROUTER6, ROUTER]
    assert previous_addresses(None, [now, ROUTER6], path, log) == [now, ROUTER6, ROUTER]
    assert path.read_text(encoding="ascii") == WRITTEN


def test_a_missing_router_file_is_ignored_and_an_unreadable_one_logged(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert previous_addresses(None, [ROUTER], tmp_path / "none", structlog.get_logger()) == [ROUTER]
        assert logs == []
        assert previous_addresses(None, [ROUTER], tmp_path, structlog.get_logger()) == [ROUTER]
    assert [(entry["log_level"], entry["error"]) for entry in logs] == [
        ("warning", f"[Errno 21] Is a directory: '{tmp_path}'")
    ]
