"""What PATCH /config accepts and refuses, and the configuration the plugin reads."""

from ipaddress import IPv4Address, IPv4Network

import msgspec
import pytest

from cells.api.config_mapping import NodeFacts, configuration_model, patch_refusal
from cells.api.models import DaemonConfigurationSpec

NODE = NodeFacts(router_ip=IPv4Address("10.0.1.5"), pod_cidr=IPv4Network("10.0.1.0/24"), mtu=1500)


def test_the_plugin_finds_what_it_needs() -> None:
    status = msgspec.to_builtins(configuration_model(NODE, {"ClusterName": "default"}))["status"]
    assert status["addressing"] == {"ipv4": {"enabled": True, "ip": "10.0.1.5", "alloc-range": "10.0.1.0/24"}}
    assert status["datapathMode"] == "veth"
    assert (status["deviceMTU"], status["routeMTU"]) == (1500, 1500)
    assert status["realized"] == {"options": {}, "policy-enforcement": "default"}
    assert status["daemonConfigurationMap"] == {"ClusterName": "default"}


def test_sending_the_configuration_back_changes_nothing() -> None:
    assert patch_refusal(configuration_model(NODE, {}).spec) is None
    assert patch_refusal(DaemonConfigurationSpec()) is None
    assert patch_refusal(DaemonConfigurationSpec(policy_enforcement="Default")) is None


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (DaemonConfigurationSpec(policy_enforcement="x"), "invalid option for PolicyEnforcement x"),
        (DaemonConfigurationSpec(policy_enforcement="Always"), "PolicyEnforcement cannot be always"),
        (DaemonConfigurationSpec(options={"MonitorNumPages": "128"}), "unknown option MonitorNumPages"),
    ],
)
def test_what_cannot_be_changed_is_named(wanted: DaemonConfigurationSpec, text: str) -> None:
    refusal = patch_refusal(wanted)
    assert refusal is not None
    assert refusal.startswith(text)
