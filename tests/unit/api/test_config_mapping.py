"""What PATCH /config accepts and refuses, and the configuration the plugin reads."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import msgspec
import pytest
from msgspec.structs import replace

from cells.api.models import DaemonConfigurationSpec, MonitorStatus
from cells.api.operations.config_mapping import (
    NodeFacts,
    configuration_model,
    event_options,
    requested_configuration,
    requested_debug,
)
from cells.base.addresses import Family
from cells.datapath.settings import MonitorNotifications
from cells.endpoint import Enforced
from cells.netlink.messages import OffloadLimits
from cells.node.router import Addressing
from cells.policy import Enforcement

V4 = Addressing(IPv4Address("10.0.1.5"), IPv4Network("10.0.1.0/24"))
V6 = Addressing(IPv6Address("fd00:1::5"), IPv6Network("fd00:1::/112"))
NODE = NodeFacts(addressing={Family.IPV4: V4}, mtu=1500)
NOTIFICATIONS = MonitorNotifications(flags=1, aggregation=3)
EVENTS = event_options(NOTIFICATIONS)
NOW = Enforced(Enforcement.DEFAULT, source_ip_verification=True)


def test_the_plugin_finds_what_it_needs() -> None:
    status = msgspec.to_builtins(configuration_model(NODE, {"ClusterName": "default"}, NOW))["status"]
    assert status["addressing"] == {"ipv4": {"enabled": True, "ip": "10.0.1.5", "alloc-range": "10.0.1.0/24"}}
    assert status["datapathMode"] == "veth"
    assert (status["deviceMTU"], status["routeMTU"]) == (1500, 1500)
    assert status["realized"] == {
        "options": event_options(NODE.notifications)
        | {"Debug": "Disabled", "SourceIPVerification": "Enabled"},
        "policy-enforcement": "default",
    }
    assert status["daemonConfigurationMap"] == {"ClusterName": "default"}


def test_datapath_notifications_can_be_changed() -> None:
    node = NodeFacts(addressing={Family.IPV4: V4}, mtu=1500, notifications=NOTIFICATIONS)
    assert msgspec.to_builtins(configuration_model(node, {}, NOW))["spec"]["options"] == {
        "Debug": "Disabled",
        "SourceIPVerification": "Enabled",
        "DropNotification": "Enabled",
        "TraceNotification": "Disabled",
        "TraceSockNotification": "Disabled",
        "PolicyVerdictNotification": "Disabled",
        "PolicyAuditMode": "Disabled",
        "MonitorAggregationLevel": "Medium",
    }


def test_each_family_that_is_on_has_its_addressing() -> None:
    both = NodeFacts(addressing={Family.IPV6: V6, Family.IPV4: V4}, mtu=1500)
    status = msgspec.to_builtins(configuration_model(both, {}, NOW))["status"]
    assert status["addressing"]["ipv6"] == {
        "enabled": True,
        "ip": "fd00:1::5",
        "alloc-range": "fd00:1::/112",
    }
    alone = NodeFacts(addressing={Family.IPV6: V6}, mtu=1500)
    status = msgspec.to_builtins(configuration_model(alone, {}, NOW))["status"]
    assert list(status["addressing"]) == ["ipv6"]


def test_the_plugin_finds_ports_and_limits_of_new_pods() -> None:
    limits = OffloadLimits(gro=196608, gso=131072)
    node = replace(NODE, reserved_ports="51871,8472", limits=limits)
    status = msgspec.to_builtins(configuration_model(node, {}, NOW))["status"]
    assert status["ipLocalReservedPorts"] == "51871,8472"
    names = ("GROMaxSize", "GSOMaxSize", "GROIPv4MaxSize", "GSOIPv4MaxSize")
    assert [status[name] for name in names] == [196608, 131072, 65536, 65536]


def test_what_is_masqueraded_monitored_and_asked_is_there() -> None:
    node = replace(
        NODE,
        masqueraded=frozenset({Family.IPV4}),
        monitor=MonitorStatus(cpus=2, npages=64, pagesize=4096),
        api_server="https://192.0.2.1:6443",
        kubeconfig="/etc/kubeconfig",
    )
    status = msgspec.to_builtins(configuration_model(node, {}, NOW))["status"]
    assert (status["masquerade"], status["masqueradeProtocols"]) == (True, {"ipv4": True})
    assert status["nodeMonitor"] == {"cpus": 2, "npages": 64, "pagesize": 4096}
    assert (status["k8s-endpoint"], status["k8s-configuration"]) == (
        "https://192.0.2.1:6443",
        "/etc/kubeconfig",
    )
    assert "masquerade" not in msgspec.to_builtins(configuration_model(NODE, {}, NOW))["status"]


@pytest.mark.parametrize("enforcement", list(Enforcement))
@pytest.mark.parametrize("verification", [True, False])
def test_sending_the_configuration_back_changes_nothing(enforcement: Enforcement, verification: bool) -> None:
    now = Enforced(enforcement, verification)
    spec = configuration_model(replace(NODE, notifications=NOTIFICATIONS), {}, now).spec
    assert requested_configuration(spec, now, NOTIFICATIONS) == (now, NOTIFICATIONS)
    assert requested_configuration(DaemonConfigurationSpec(options=EVENTS), now, NOTIFICATIONS) == (
        now,
        NOTIFICATIONS,
    )


@pytest.mark.parametrize(
    ("wanted", "enforced"),
    [
        (DaemonConfigurationSpec(policy_enforcement="Always"), Enforced(Enforcement.ALWAYS, True)),
        (DaemonConfigurationSpec(policy_enforcement="never"), Enforced(Enforcement.NEVER, True)),
        (
            DaemonConfigurationSpec(options={"SourceIPVerification": "0"}),
            Enforced(Enforcement.DEFAULT, False),
        ),
        (
            DaemonConfigurationSpec(
                options={"SourceIPVerification": "Disabled"}, policy_enforcement="always"
            ),
            Enforced(Enforcement.ALWAYS, False),
        ),
    ],
)
def test_named_options_are_changed_and_others_stay(
    wanted: DaemonConfigurationSpec, enforced: Enforced
) -> None:
    assert requested_configuration(wanted, NOW, NOTIFICATIONS) == (enforced, NOTIFICATIONS)


@pytest.mark.parametrize(
    ("options", "notifications"),
    [
        ({"DropNotification": "Disabled"}, MonitorNotifications(0, 3)),
        ({"TraceNotification": "enable", "PolicyVerdictNotification": "1"}, MonitorNotifications(7, 3)),
        ({"MonitorAggregationLevel": "None"}, MonitorNotifications(1, 0)),
        ({"MonitorAggregationLevel": "4"}, MonitorNotifications(1, 4)),
    ],
)
def test_notifications_are_changed(options: dict[str, str], notifications: MonitorNotifications) -> None:
    wanted = DaemonConfigurationSpec(options=options)
    assert requested_configuration(wanted, NOW, NOTIFICATIONS) == (NOW, notifications)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (DaemonConfigurationSpec(policy_enforcement="x"), "invalid option for PolicyEnforcement x"),
        (DaemonConfigurationSpec(options={"MonitorNumPages": "128"}), "unknown option MonitorNumPages"),
        (
            DaemonConfigurationSpec(options={"MonitorAggregationLevel": "much"}),
            'invalid option value "much" for MonitorAggregationLevel: expected None, Lowest, Low, Medium',
        ),
        (DaemonConfigurationSpec(options={"SourceIPVerification": "7"}), 'invalid option value "7"'),
        (
            DaemonConfigurationSpec(options={"ConntrackAccounting": "Enabled"}),
            "option ConntrackAccounting is not built yet: it can only be Disabled",
        ),
        (
            DaemonConfigurationSpec(options={"PolicyAccounting": "Disabled"}),
            "option PolicyAccounting cannot be switched off: policy entries always count",
        ),
    ],
)
def test_unchangeable_options_are_refused_by_name(wanted: DaemonConfigurationSpec, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        requested_configuration(wanted, NOW, NOTIFICATIONS)


def test_switches_with_the_current_value_are_accepted() -> None:
    wanted = DaemonConfigurationSpec(options={"ConntrackAccounting": "Disabled", "PolicyAccounting": "1"})
    assert requested_configuration(wanted, NOW, NOTIFICATIONS) == (NOW, NOTIFICATIONS)


def test_debug_is_changed_when_it_is_named() -> None:
    for value, on in (("Enabled", True), ("false", False)):
        assert requested_debug(DaemonConfigurationSpec(options={"Debug": value}), not on) is on
    assert requested_debug(DaemonConfigurationSpec(), True)
    with pytest.raises(ValueError, match='invalid option value "7" for Debug'):
        requested_debug(DaemonConfigurationSpec(options={"Debug": "7"}), now=False)
