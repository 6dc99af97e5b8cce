"""XFRM messages: policies in the kernel, states as iproute2 prints them; a kernel without ESP."""

import errno
import io
import json
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from ipaddress import ip_address, ip_network
from pathlib import Path
from unittest.mock import patch

import pytest

from cells.datapath.build import find_clang
from cells.encryption.ipsec.reconciler import KernelIpsec
from cells.netlink.wire import HEADER, NLM_F_REQUEST, Request
from cells.netlink.xfrm import (
    Algorithm,
    Direction,
    KeyOctets,
    XfrmKernel,
    XfrmMark,
    XfrmPolicy,
    XfrmState,
    XfrmTemplate,
    add_state,
    read_state,
    sent_sequence,
)
from hive.dbg.main import run as hive_dbg
from lifecycle import Hive, StartError, exit_code
from tests.kernel.netlink.ipsec_node import IpsecWorld
from tests.support.namespaces import in_node
from tests.support.recordings import recordings
from tests.unit.hive.stub_agent import stub_agent

__all__ = ["in_node"]
pytestmark = pytest.mark.kernel

OUT = XfrmMark(0x12023E00, 0xFFFFFF00)
STATES = tuple(
    XfrmState(
        source=ip_address(source),
        destination=ip_address(destination),
        spi=3,
        mark=XfrmMark(0x12020D00, 0xFFFF0F00),
        output_mark=XfrmMark(0xD00, 0xFFFFFF00),
        aead=Algorithm("rfc4106(gcm(aes))", KeyOctets(bytes(range(20))), 128) if gcm else None,
        auth=None if gcm else Algorithm("hmac(sha256)", KeyOctets(bytes(32)), 96),
        crypt=None if gcm else Algorithm("cbc(aes)", KeyOctets(bytes(range(16)))),
    )
    for source, destination, gcm in (("10.0.2.1", "10.0.1.1", True), ("fd00::2:1", "fd00::1:1", False))
)


def policies() -> tuple[XfrmPolicy, ...]:
    """One of each kind, in both families."""
    found = []
    for everywhere, network, own, other in (
        ("0.0.0.0/0", "10.0.2.0/24", "10.0.1.1", "10.0.2.1"),
        ("::/0", "fd00:0:0:2::/96", "fd00::1:1", "fd00::2:1"),
    ):
        template = XfrmTemplate(ip_address(own), ip_address(other), 3, 1)
        whole = ip_network(everywhere)
        optional = (XfrmTemplate(optional=True),)
        found += [
            XfrmPolicy(
                direction=Direction.OUT,
                source=whole,
                destination=ip_network(network),
                mark=OUT,
                templates=(template,),
            ),
            XfrmPolicy(direction=Direction.IN, source=whole, destination=whole, templates=optional),
            XfrmPolicy(
                direction=Direction.FWD, source=whole, destination=whole, priority=2975, templates=optional
            ),
            XfrmPolicy(
                direction=Direction.OUT,
                source=whole,
                destination=whole,
                mark=XfrmMark(0xE00, 0xF00),
                priority=100,
                block=True,
            ),
        ]
    return tuple(found)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


async def test_xfrm_policies_are_created_listed_replaced_and_removed(in_node: None) -> None:
    kernel, made = XfrmKernel(), policies()
    assert await kernel.set_policies(made) == [None] * 8
    assert set(await kernel.policies()) == set(made)
    shown = " ".join(run("ip", "xfrm", "policy", "list").replace("ptype main", "").split())
    assert "src 0.0.0.0/0 dst 10.0.2.0/24 dir out priority 0 mark 0x12023e00/0xffffff00" in shown
    assert "tmpl src 10.0.1.1 dst 10.0.2.1 proto esp spi 0x00000003 reqid 1 mode tunnel" in shown
    assert (
        "dir fwd priority 2975 tmpl src 0.0.0.0 dst 0.0.0.0 proto esp reqid 0 mode tunnel level use" in shown
    )
    assert "src ::/0 dst ::/0 dir out action block priority 100 mark 0xe00/0xf00" in shown
    other = XfrmTemplate(ip_address("10.0.1.1"), ip_address("10.0.2.9"), 3, 1)
    changed = XfrmPolicy(
        direction=Direction.OUT,
        source=made[0].source,
        destination=made[0].destination,
        mark=OUT,
        templates=(other,),
    )
    assert await kernel.set_policies([changed]) == [None]
    assert set(await kernel.policies()) == {changed, *made[1:]}
    assert await kernel.delete_policies([*made, made[0]]) == [None] * 9
    assert await kernel.policies() == []


async def test_policies_of_others_are_read_or_left_out(in_node: None) -> None:
    run("ip", "xfrm", "policy", "add", "src", "10.0.0.0/8", "dst", "10.9.0.0/16", "dir", "out")
    run(
        "ip", "xfrm", "policy", "add", "src", "10.1.0.0/16", "dst", "10.9.0.0/16", "proto", "tcp", "dir", "in"
    )
    (found,) = await XfrmKernel().policies()
    assert found.key == (Direction.OUT, "10.0.0.0/8", "10.9.0.0/16", None)


LEFTOVERS = """
rule add pref 1 fwmark 0xd00/0xf00 lookup 200 proto kernel
rule add pref 1 fwmark 0xe00/0xf00 lookup 200 proto kernel
-6 rule add pref 1 fwmark 0xe00/0xf00 lookup 200 proto kernel
route add local 10.0.1.0/24 dev lo table 200
route add 10.0.2.0/24 dev lo table 200 mtu 1400
-6 route add fd00:0:0:2::/96 dev lo table 200
"""
"""What Cilium's agent with IPsec makes."""
FOREIGN = """
rule add pref 1 fwmark 0x200/0xf00 lookup 2004
route add 10.9.0.0/16 dev lo table 2004
xfrm policy add src 10.0.0.0/8 dst 10.9.0.0/16 dir out
"""


def rest() -> str:
    """Rules, routes and policies that there are besides the kernel's own."""
    listed = ("rule", "-6 rule", "route list table all", "-6 route list table all", "xfrm policy list")
    lines = [line for each in listed for line in run("ip", *each.split()).splitlines()]
    own = ("0:", "32766:", "32767:", "local 127", "local ::1", "broadcast", "multicast", "::1 ")
    return "\n".join(line for line in lines if not line.startswith(own))


@asynccontextmanager
async def agent(**settings: str) -> AsyncIterator[Hive]:
    async with IpsecWorld(kernel=KernelIpsec()).agent(**settings) as hive:
        yield hive


async def test_without_the_setting_all_that_is_left_of_ipsec_goes_and_nothing_else(in_node: None) -> None:
    for line in FOREIGN.strip().splitlines():
        run("ip", *line.split())
    before = rest()
    for line in LEFTOVERS.strip().splitlines():
        run("ip", *line.split())
    assert await XfrmKernel().set_policies(policies()) == [None] * 8
    assert "lookup 200" in rest()
    async with agent():
        assert rest() == before


async def test_a_table_200_of_another_program_is_left_alone(in_node: None) -> None:
    run("ip", "route", "add", "10.9.0.0/16", "dev", "lo", "table", "200")
    before = rest()
    async with agent():
        assert rest() == before


GOOD = "3+ rfc4106(gcm(aes)) 44434241343332312423222114131211f4f3f2f1 128\n"


async def test_a_kernel_without_esp_is_named_at_the_start(in_node: None, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(GOOD)
    if (await XfrmKernel().add_states(STATES[:1]))[0] is None:
        pytest.skip("this kernel has ESP")
    with pytest.raises(StartError) as caught:
        async with agent(**{"enable-ipsec": "true", "ipsec-key-file": str(keys)}):
            pass
    text = str(caught.value)
    why = "this kernel has no ESP for IPv4 .*(AEAD algorithm|type) not found"
    assert re.search(why, text), text
    assert "44434241" not in text
    assert exit_code(caught.value) == 1
    assert await XfrmKernel().states() == []


async def test_a_file_without_a_key_is_refused(in_node: None, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for text, fault in (
        (None, ": No such file or directory; expected a line .*, as the Secret cilium-ipsec-keys mounts it"),
        ("", ": no key in it; expected"),
        ("3 rfc4106(gcm(aes)) 44434241343332312423X 128", ", line 1: unable to decode AEAD key string"),
        (f"{GOOD}\n\n", ", line 2: missing IPSec key or invalid format; expected a line"),
        (GOOD.replace("3+", "0"), ", line 1: .*zero is not a valid key ID"),
        (GOOD.replace("3+", "16"), ", line 1: .*encryption key space exhausted. .* less than 16"),
    ):
        if text is not None:
            keys.write_text(text)
        with pytest.raises(StartError, match=f"ipsec-key-file={keys}{fault}") as caught:
            async with agent(**{"enable-ipsec": "true", "ipsec-key-file": str(keys)}):
                pass
        assert exit_code(caught.value) == 2
        assert "44434241" not in str(caught.value)


def test_encrypt_flush_deletes_what_cilium_deletes_in_its_words(in_node: None) -> None:
    files = sorted(recordings("ipsec").glob("dbg_encrypt_flush_*.json"))
    assert len(files) == 10
    for case in (json.loads(path.read_text()) for path in files):
        run("ip", "xfrm", "policy", "flush")
        for line in case["policies_before"]:
            run("ip", "xfrm", "policy", "add", *re.sub(r"mark (\w+)/", r"mark \1 mask ", line).split())
        code, out, err = dbg(case["argv"][1:], case.get("stdin", ""))
        assert (code, out.rstrip()) == (case["exit_code"], case["stdout"].rstrip()), case["name"]
        if case["name"] == "dbg_encrypt_flush_stale_no_map":  # ours names the map
            assert "cilium_node_map_v2" in err
        else:
            assert err.rstrip() == case["stderr"].rstrip(), case["name"]
        left = [
            " ".join(line.split())
            for line in run("ip", "xfrm", "policy").replace("src ", "\0src ").split("\0")
        ]
        assert rejoined(left) == sorted(case["policies_after"]), case["name"]


def test_encrypt_status_shows_what_the_kernel_has_in_cilium_s_words(in_node: None, tmp_path: Path) -> None:
    names = ("dbg_encrypt_status", "dbg_encrypt_status_json", "dbg_status_ipsec")
    for case in (json.loads((recordings("ipsec") / f"{name}.json").read_text()) for name in names):
        answers = {
            each["request"]["path"]: (each["response"]["status"], each["response"]["body"])
            for each in case["exchanges"]
        }
        with (
            stub_agent(tmp_path, answers) as stub,
            patch.dict("os.environ", {"CILIUM_SOCK": str(stub.socket)}),
        ):
            code, out, err = dbg(case["argv"][1:], "")
        assert (code, err) == (0, ""), case["name"]
        assert out.rstrip() == case["stdout"].rstrip(), case["name"]
        (tmp_path / "cilium.sock").unlink(missing_ok=True)


def test_encrypt_status_names_links_with_a_decrypting_program(in_node: None, tmp_path: Path) -> None:
    source, made, pinned = tmp_path / "a.c", tmp_path / "a.o", "/sys/fs/bpf/cil_from_network-eth0"
    source.write_text('__attribute__((section("tc"), used)) int cil_from_network(void *skb) { return 0; }\n')
    run(find_clang(), "-O2", "-g", "-target", "bpf", "-c", str(source), "-o", str(made))
    run("bpftool", "prog", "load", str(made), pinned)
    ours = "/sys/fs/bpf/cil_from_netdev-eth2"
    run("bpftool", "prog", "load", str(made), ours)
    for name, peer in (("eth0", "eth1"), ("eth2", "eth3")):
        run("ip", "link", "add", name, "type", "veth", "peer", "name", peer)
        for each in (name, peer):
            run("tc", "qdisc", "add", "dev", each, "clsact")
    run("tc", "filter", "add", "dev", "eth0", "ingress", "bpf", "da", "object-pinned", pinned)
    run("tc", "filter", "add", "dev", "eth2", "ingress", "bpf", "da", "object-pinned", ours)
    answers = {"/v1/healthz": (200, {"encryption": {"mode": "IPsec"}})}
    with (
        stub_agent(tmp_path, answers),
        patch.dict("os.environ", {"CILIUM_SOCK": str(tmp_path / "cilium.sock")}),
    ):
        code, out, _ = dbg(["encrypt", "status"], "")
    assert code == 0
    assert "Decryption interface(s): eth0, eth2\n" in out


def dbg(words: list[str], answer: str) -> tuple[int, str, str]:
    """Run cilium-dbg with these words and this answer to its question: exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", io.StringIO(answer)):
        code = hive_dbg(words)
    return code, out.getvalue(), err.getvalue()


def rejoined(parts: list[str]) -> list[str]:
    """Policies of `ip xfrm policy`, each in a line: a template has a source too."""
    found: list[str] = []
    for part in filter(None, parts):
        if found and found[-1].endswith("tmpl"):
            found[-1] += f" {part}"
        else:
            found.append(part)
    return sorted(found)


def as_message(request: Request) -> bytes:
    return (
        HEADER.pack(16 + len(request.body), request.type, request.flags | NLM_F_REQUEST, 1, 0) + request.body
    )


def shown_states(states: Sequence[XfrmState], folder: Path) -> str:
    """The messages that add them, as iproute2 reads them out of a file."""
    path = folder / "messages"
    path.write_bytes(b"".join(as_message(add_state(one)) for one in states))
    return " ".join(run("ip", "xfrm", "monitor", "file", str(path)).split())


def test_states_are_encoded_as_iproute2_reads_them(tmp_path: Path) -> None:
    shown = shown_states(STATES, tmp_path)
    for state in STATES:
        assert (
            f"src {state.source} dst {state.destination} proto esp spi 0x00000003 reqid 1 mode tunnel"
            in shown
        )
    assert shown.count("mark 0x12020d00/0xffff0f00 output-mark 0xd00/0xffffff00") == 2
    assert f"aead rfc4106(gcm(aes)) 0x{bytes(range(20)).hex()} 128" in shown
    assert f"auth-trunc hmac(sha256) 0x{bytes(32).hex()} 96" in shown
    assert f"enc cbc(aes) 0x{bytes(range(16)).hex()}" in shown
    assert len(re.findall(r"replay_window 1024, bitmap-length 32", shown)) == 2
    assert shown.count("flag esn") == 2
    assert [read_state(add_state(one).body) for one in STATES[:1]] == [STATES[0]]
    assert [sent_sequence(add_state(one).body) for one in STATES] == [0, 0]


async def test_states_are_taken_or_refused_with_what_the_kernel_lacks(in_node: None) -> None:
    kernel = XfrmKernel()
    refused = await kernel.add_states(STATES)
    assert await kernel.delete_states(STATES) == [None, None]
    assert await kernel.states() == []
    if refused[0] is None:  # this kernel has ESP
        assert refused == [None] * len(STATES)
        return
    assert refused[0].errno in (errno.ENOSYS, errno.EPROTONOSUPPORT, errno.ENOENT)
    assert "AEAD" in str(refused[0]) or "type" in str(refused[0])
    assert bytes(range(20)).hex() not in str(refused[0])
