"""The plugin with arbitrary input of runtime and agent exits at once with one clear error.

The same inputs are run with the address and undefined behaviour sanitizers, if gcc has them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cni_plugin import HEADER
from tests.support.plugin import ROOT, compiled_plugin
from tests.unit.fuzz.inputs import bounded, damaged, nested, odd_bytes

HASTE = ("-DADD_PATIENCE_MS=5", "-DDEL_PATIENCE_MS=5", "-DLOCK_PATIENCE_MS=50", "-DANSWER_PATIENCE_MS=2000")
UNPRIVILEGED = 65534
CONFIGURATION = {
    "cniVersion": "1.1.0",
    "name": "cilium",
    "type": "cilium-cni",
    "agent-socket": "@@@/run/cni.sock",
    "log-file": "run/cni.log",
    "enable-debug": True,
    "chaining-mode": "",
}
PLAIN = json.dumps(CONFIGURATION).encode()
ENVIRONMENT = {
    b"CNI_COMMAND": b"DEL",
    b"CNI_CONTAINERID": b"cid1",
    b"CNI_NETNS": b"",
    b"CNI_IFNAME": b"eth0",
    b"CNI_ARGS": b"IgnoreUnknown=1;K8S_POD_NAME=web-0",
    b"CNI_PATH": b"/opt/cni/bin",
    b"CNI_NETNS_OVERRIDE": b"",
}

texts = (odd_bytes | st.sampled_from([b"1", b"true", b"/proc/self/ns/net", b"/dev/zero", b"x" * 300])).map(
    lambda raw: raw.replace(b"\0", b"")
)
commands = st.sampled_from([b"ADD", b"DEL", b"DEL", b"CHECK", b"STATUS", b"GC", b"VERSION"]) | texts


@st.composite
def environments(draw: st.DrawFn) -> dict[bytes, bytes]:
    values = {**ENVIRONMENT, b"CNI_COMMAND": draw(commands)}
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=2, unique=True)):
        if draw(st.booleans()):
            values[name] = draw(texts)
        else:
            del values[name]
    return values


inputs = st.one_of(
    st.just(PLAIN),
    damaged(CONFIGURATION),
    odd_bytes,
    st.sampled_from(
        [b'{"cniVersion":"1.1.0","name":"\\ud83d\\ud83d\\ude00\\u0000"}', b"-", b'"\\', b"[" * 5000]
    ),
)


class Bench:
    """A plugin, run as an unprivileged user, in a directory where it may write."""

    def __init__(self, plugin: Path, folder: Path) -> None:
        self.plugin, self.folder = plugin, folder
        (folder / "run").mkdir()
        os.mkfifo(folder / "pipe")
        for path in (plugin, plugin.parent, folder.parent.parent, folder.parent, folder, folder / "run"):
            path.chmod(0o777)
        self._user = (
            {"user": UNPRIVILEGED, "group": UNPRIVILEGED, "extra_groups": []} if os.geteuid() == 0 else {}
        )

    def run(self, env: dict[bytes, bytes], stdin: bytes) -> tuple[int, bytes]:
        """Exit code and output, which are in order."""
        sanitizers = {b"ASAN_OPTIONS": b"detect_leaks=0", b"UBSAN_OPTIONS": b"halt_on_error=1"}
        done = subprocess.run(
            [self.plugin],
            env={**env, **sanitizers},
            input=stdin.replace(b"@@@", os.fsencode(self.folder)),
            cwd=self.folder,
            capture_output=True,
            timeout=10,
            check=False,
            **self._user,  # type: ignore[call-overload]
        )
        assert b"Sanitizer" not in done.stderr, done.stderr.decode(errors="replace")
        assert b"runtime error" not in done.stderr, done.stderr.decode(errors="replace")
        assert done.returncode >= 0, done
        return done.returncode, done.stdout

    def answered(self, env: dict[bytes, bytes], stdin: bytes) -> None:
        """It ends well or with an error as the CNI specification has it; what it queued is whole."""
        code, stdout = self.run(env, stdin)
        assert code in {0, 1}
        if code:
            error = json.loads(stdout)
            assert error["code"] > 0
            assert error["msg"]
        elif stdout:
            json.loads(stdout)
        for path in (self.folder / "run").glob("deleteQueue/*"):
            if path.name != "lockfile":
                assert json.loads(path.read_bytes()), path
                path.unlink()


def sanitized(folder: Path) -> Path:
    """A plugin that reports every wrong access."""
    output = folder / "cilium-cni-sanitized"
    sources = sorted(map(str, (ROOT / "cmd/cilium-cni").glob("*.c")))
    flags = ["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.fail("gcc is not installed: install Debian's gcc")
    done = subprocess.run(
        [gcc, *flags, *HASTE, "-o", output, *sources], capture_output=True, text=True, check=False
    )
    if done.returncode and "asan" in done.stderr:
        pytest.fail(f"gcc has no sanitizers: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module", params=["as it ships", "sanitized"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        folder = Path(made)
        if request.param == "sanitized":
            plugin = sanitized(folder)
        else:
            plugin = Path(shutil.copy(compiled_plugin(*HASTE), folder / "cilium-cni"))
        deep = folder / "a" / "b" / "c"
        deep.mkdir(parents=True)
        yield Bench(plugin, deep)


def test_any_input_is_answered(bench: Bench) -> None:
    @bounded(110)
    @example(ENVIRONMENT, nested(1001))
    @example({**ENVIRONMENT, b"CNI_CONTAINERID": b"c" * 100_000}, PLAIN)
    @example(ENVIRONMENT, PLAIN + b" " * (2 << 20))
    @example({**ENVIRONMENT, b"CNI_NETNS": b"pipe", b"CNI_COMMAND": b"ADD"}, PLAIN)
    @example(ENVIRONMENT, PLAIN.replace(b"run/cni.log", b"pipe"))
    @given(environments(), inputs)
    def is_answered(env: dict[bytes, bytes], stdin: bytes) -> None:
        bench.answered(env, stdin)

    is_answered()


replies = st.one_of(
    odd_bytes,
    st.builds(
        lambda version, patch, code, length, rest: HEADER.pack(b"HCNI", version, patch, code, length) + rest,
        st.sampled_from([0, 1, 1, 1, 2, 65535]),
        st.sampled_from([0, 1, 65535]),
        st.sampled_from([0, 1, 255, 256, 2**32 - 1]),
        st.sampled_from([0, 1, 5, 2**31, 2**32 - 1]),
        st.just(b"hello") | odd_bytes,
    ),
)


def test_any_reply_of_an_agent_is_understood_or_refused(bench: Bench) -> None:
    path = bench.folder / "run" / "cni.sock"
    current = [b""]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connected, _ = listener.accept()
                except OSError:
                    return
                with connected, suppress(OSError):
                    connected.recv(1 << 18)
                    connected.send(current[0])

        thread = threading.Thread(target=serve)
        thread.start()
        try:

            @bounded(80)
            @given(replies, st.sampled_from([b"DEL", b"STATUS", b"GC"]))
            def is_understood(reply: bytes, command: bytes) -> None:
                current[0] = reply
                code, _ = bench.run({**ENVIRONMENT, b"CNI_COMMAND": command}, PLAIN)
                assert code >= 0

            is_understood()
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    path.unlink()
