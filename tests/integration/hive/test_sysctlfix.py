"""hive sysctlfix: its file, and systemd over a private message bus."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from jeepney import DBusAddress, HeaderFields, Message, new_error, new_method_return, new_signal
from jeepney.bus_messages import message_bus
from jeepney.io.blocking import Proxy, open_dbus_connection

from hive.init import systemd
from hive.init.sysctlfix import CONTENT, command

UNIT = "systemd-sysctl.service"
SYSTEMD = "org.freedesktop.systemd1"
MANAGER = DBusAddress("/org/freedesktop/systemd1", SYSTEMD, f"{SYSTEMD}.Manager")
BUS = """<busconfig><type>custom</type><listen>unix:path={socket}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/>
<allow own="*"/></policy></busconfig>"""


class FakeSystemd:
    """Answers on the bus as systemd's manager does for one unit; ``calls`` are what it was asked."""

    def __init__(self, result: str = "done", *, silent: bool = False) -> None:
        self.calls: list[str] = []
        self._result = result
        self._silent = silent
        self._bus = open_dbus_connection("SYSTEM")
        Proxy(message_bus, self._bus, timeout=30).RequestName(SYSTEMD)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._answer(self._bus.receive())
            except (OSError, EOFError):
                return  # the bus is closed, by the other side or by us

    def _answer(self, asked: Message) -> None:
        member = asked.header.fields.get(HeaderFields.member)
        if self._silent or HeaderFields.reply_serial in asked.header.fields:
            return
        self.calls.append(f"{member} {' '.join(map(str, asked.body))}".strip())
        match member:
            case "LoadUnit":
                reply = new_method_return(asked, "o", (f"/unit/{'a' if asked.body[0] == UNIT else 'none'}",))
            case "Get":
                path = asked.header.fields[HeaderFields.path]
                state = "loaded" if path == "/unit/a" else "not-found"
                reply = new_method_return(asked, "v", (("s", state),))
            case "Subscribe":
                reply = new_method_return(asked)
            case "RestartUnit":
                reply = new_method_return(asked, "o", ("/job/7",))
            case _:
                reply = new_error(asked, "org.freedesktop.DBus.Error.UnknownMethod", "s", ("unknown",))
        self._bus.send(reply)
        if member == "RestartUnit":
            for job, result in (("/job/6", "failed"), ("/job/7", self._result)):
                body = 7, job, UNIT, result
                self._bus.send(new_signal(MANAGER, "JobRemoved", "uoss", body))

    def close(self) -> None:
        """Leave the bus; the thread must have seen that before its socket is another's."""
        with suppress(OSError):
            self._bus.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._bus.close()


@contextmanager
def systemd_on_a_bus(result: str = "done", *, silent: bool = False) -> Iterator[FakeSystemd]:
    fake = FakeSystemd(result, silent=silent)
    try:
        yield fake
    finally:
        fake.close()


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A private message bus, where the system's is looked for."""
    socket, config = tmp_path / "bus", tmp_path / "bus.conf"
    config.write_text(BUS.format(socket=socket))
    daemon = subprocess.Popen(
        ["dbus-daemon", f"--config-file={config}", "--nofork", "--print-address"], stdout=subprocess.PIPE
    )
    assert daemon.stdout
    daemon.stdout.readline()  # it listens
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={socket}")
    yield
    daemon.kill()
    daemon.wait()
    daemon.stdout.close()


def sysctlfix(directory: Path, *arguments: str) -> list[str]:
    result = CliRunner().invoke(command, [f"--sysctl-conf-dir={directory}", *arguments])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_the_sysctl_file_is_written_once_and_systemd_restarted_once(bus: None, tmp_path: Path) -> None:
    path = tmp_path / "99-zzz-override_cilium.conf"
    with systemd_on_a_bus() as fake:
        assert sysctlfix(tmp_path) == [f"sysctl config created: {path}", f"systemd unit '{UNIT}' restarted"]
        assert fake.calls[-1] == f"RestartUnit {UNIT} replace"
        assert path.read_text() == CONTENT
        assert path.stat().st_mode & 0o777 == 0o644
        fake.calls.clear()
        assert sysctlfix(tmp_path) == ["sysctl config up-to-date, nothing to do"]
        assert fake.calls == []
        path.write_text("net.ipv4.conf.all.rp_filter = 1\n")
        assert sysctlfix(tmp_path)[0] == f"sysctl config updated: {path}"


def test_the_settings_are_those_of_our_devices() -> None:
    assert [line for line in CONTENT.splitlines() if line and not line.startswith("#")] == [
        "-net.ipv4.conf.lxc*.rp_filter = 0",
        "-net.ipv4.conf.cilium_*.rp_filter = 0",
        "net.ipv4.conf.all.rp_filter = 0",
    ]


def test_without_the_systemd_unit_nothing_is_restarted(bus: None, tmp_path: Path) -> None:
    with systemd_on_a_bus() as fake:
        output = sysctlfix(tmp_path, "--systemd-sysctl-unit=other.service")
        assert output[-1] == "systemd unit 'other.service' not found: nothing to restart"
        assert not any(call.startswith("RestartUnit") for call in fake.calls)


def test_a_failed_restart_of_systemd_sysctl_is_reported(bus: None, tmp_path: Path) -> None:
    with systemd_on_a_bus("failed"):
        last_line = sysctlfix(tmp_path)[-1]
    assert last_line == f"systemd unit '{UNIT}' not restarted: restarting {UNIT} ended with: failed"


def test_a_systemd_that_does_not_answer_is_given_up(bus: None) -> None:
    with (
        systemd_on_a_bus(silent=True),
        pytest.raises(systemd.SystemdError, match="no answer within 0 s"),
    ):
        systemd.restart_unit(UNIT, within=0.2)


def test_without_a_message_bus_a_warning_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path / 'none'}")
    assert sysctlfix(tmp_path)[-1].startswith(
        f"systemd unit '{UNIT}' not restarted: the system's message bus is not there: "
    )


def test_a_missing_sysctl_directory_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "none" / "99-zzz-override_cilium.conf"
    assert sysctlfix(tmp_path / "none") == [f"sysctl config not written to {path}: No such file or directory"]
