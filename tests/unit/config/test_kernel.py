"""Kernels that are too old are rejected in one line; missing features of others are reported."""

from pathlib import Path

import pytest

from cells.config import check_kernel, missing_features
from lifecycle import HiveError


@pytest.mark.parametrize("release", ["5.10.0-28-amd64", "5.13.19", "4.18.0-513.el8.x86_64"])
def test_an_old_kernel_is_refused(release: str) -> None:
    with pytest.raises(HiveError) as caught:
        check_kernel(release)
    assert str(caught.value) == (
        f"Linux {release} is too old: the agent needs 5.14 or later, which reports the network"
        " namespace of each pod; start a newer kernel"
    )


@pytest.mark.parametrize("release", ["5.14.0-427.el9.x86_64", "6.1.0-18-amd64", "6.18.44", "7.0", "custom"])
def test_newer_kernels_are_accepted(release: str) -> None:
    check_kernel(release)


def test_missing_kernel_features_are_reported_with_the_needed_version(tmp_path: Path) -> None:
    late = "the first packet of a pod to the node may be delayed by up to a second; requires Linux 6.8"
    btf = tmp_path / "vmlinux"
    btf.touch()
    assert missing_features("6.1.0-18-amd64", btf) == [late]
    assert missing_features("6.8.0-31-generic", btf) == missing_features("custom", btf) == []
    lockdown = tmp_path / "lockdown"
    lockdown.write_text("none [integrity] confidentiality\n")
    assert missing_features("custom", btf, lockdown) == []
    lockdown.write_text("none integrity [confidentiality]\n")
    (locked,) = missing_features("custom", btf, lockdown)
    assert locked.endswith("requires a kernel without lockdown=confidentiality")
    btf.unlink()
    (untyped,) = missing_features("6.8.0-31-generic", btf)
    assert untyped.endswith("requires a kernel with CONFIG_DEBUG_INFO_BTF")
