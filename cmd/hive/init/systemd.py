"""Restarts a systemd unit over the system bus.

Source: org.freedesktop.systemd1(5), the Manager object.
"""

import time

from jeepney import DBusAddress, MatchRule, Properties, message_bus, new_method_call
from jeepney.io.blocking import DBusConnection, Proxy, open_dbus_connection
from jeepney.low_level import Message, MessageType

_MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", "org.freedesktop.systemd1", "org.freedesktop.systemd1.Manager"
)


class SystemdError(Exception):
    """systemd or the bus failed."""


def restart_unit(unit: str, within: float = 15.0) -> bool:
    """Restart a unit and wait for the result; return False if the node has no such unit.

    ``within`` is the timeout of everything, in seconds. Raises SystemdError.
    """
    deadline = time.monotonic() + within
    try:
        with open_dbus_connection("SYSTEM") as bus:
            return _restart(bus, unit, deadline)
    except TimeoutError as error:
        raise SystemdError(f"no answer within {within:.0f} s") from error
    except (OSError, KeyError, ValueError) as error:
        raise SystemdError(f"the system's message bus is not there: {error}") from error


def _restart(bus: DBusConnection, unit: str, deadline: float) -> bool:
    path = _ask(bus, new_method_call(_MANAGER, "LoadUnit", "s", (unit,)), deadline)[0]
    loaded = Properties(DBusAddress(str(path), _MANAGER.bus_name, "org.freedesktop.systemd1.Unit"))
    if _ask(bus, loaded.get("LoadState"), deadline)[0] != ("s", "loaded"):
        return False
    removed = MatchRule(
        type="signal", interface=_MANAGER.interface, member="JobRemoved", path=_MANAGER.object_path
    )
    Proxy(message_bus, bus, timeout=_left(deadline)).AddMatch(removed)
    _ask(bus, new_method_call(_MANAGER, "Subscribe"), deadline)
    with bus.filter(removed) as signals:
        job = _ask(bus, new_method_call(_MANAGER, "RestartUnit", "ss", (unit, "replace")), deadline)[0]
        while True:
            _, done, _, result = bus.recv_until_filtered(signals, timeout=_left(deadline)).body
            if done == job:
                break
    if result != "done":
        raise SystemdError(f"restarting {unit} ended with: {result}")
    return True


def _ask(bus: DBusConnection, call: Message, deadline: float) -> tuple[object, ...]:
    reply = bus.send_and_get_reply(call, timeout=_left(deadline))
    if reply.header.message_type is MessageType.error:
        raise SystemdError(": ".join(map(str, reply.body)) or "refused")
    return tuple(reply.body)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
