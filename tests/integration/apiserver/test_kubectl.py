"""The installed kubectl works against the fake API server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.apiserver import ApiServer
from tests.support.apiserver.__main__ import kubeconfig
from tests.support.apiserver.certificates import Authority
from tests.unit.apiserver.requests import definition

pytestmark = pytest.mark.anyio
KUBECTL = shutil.which("kubectl")


class Kubectl:
    """Runs kubectl with a home of its own."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def environment(self) -> dict[str, str]:
        """Nothing of the machine's."""
        return {"HOME": str(self._home), "KUBECONFIG": str(self._home / "config"), "PATH": os.environ["PATH"]}

    async def __call__(self, *arguments: str, stdin: str = "") -> str:
        process = await asyncio.create_subprocess_exec(
            KUBECTL or "kubectl",
            *arguments,
            env=self.environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate(stdin.encode())
        assert process.returncode == 0, errors.decode()
        return out.decode()

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[asyncio.StreamReader]:
        """Its output while it runs."""
        process = await asyncio.create_subprocess_exec(
            KUBECTL or "kubectl", *arguments, env=self.environment(), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(30):
                yield process.stdout
        finally:
            process.terminate()
            await process.wait()


@pytest.fixture
async def kubectl(tmp_path: Path) -> AsyncIterator[Kubectl]:
    assert KUBECTL, "kubectl is not installed: apt-get install kubernetes-client"
    server = ApiServer()
    server.add(definition())
    authority = Authority(tmp_path)
    async with server.serving(tls=authority.serving()) as url:
        (tmp_path / "config").write_text(kubeconfig(url, authority.certificate))
        yield Kubectl(tmp_path)


POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web", "labels": {"app": "web"}},
    "spec": {"nodeName": "node-a", "containers": [{"name": "c", "image": "registry.example/app:1"}]},
}


async def test_kubectl_applies_gets_watches_and_deletes(kubectl: Kubectl) -> None:
    assert "pod/web created" in await kubectl("apply", "-f", "-", stdin=json.dumps(POD))
    assert "pod/web unchanged" in await kubectl("apply", "-f", "-", stdin=json.dumps(POD))
    table = await kubectl("get", "pods", "-o", "wide")
    assert table.split()[:2] == ["NAME", "READY"]
    assert "web" in table
    changed = {**POD, "metadata": {"name": "web", "labels": {"app": "web", "tier": "1"}}}
    applied = await kubectl(
        "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(changed)
    )
    assert "serverside-applied" in applied
    assert json.loads(await kubectl("get", "pod", "web", "-o", "json"))["metadata"]["labels"] == {
        "app": "web",
        "tier": "1",
    }
    async with kubectl.running("get", "pods", "--watch", "--output-watch-events") as lines:
        assert (await lines.readline()).split()[:2] == [b"EVENT", b"NAME"]
        assert (await lines.readline()).split()[:2] == [b"ADDED", b"web"]
        await kubectl("delete", "pod", "web", "--grace-period=0", "--force")
        while (line := await lines.readline()).split()[:2] != [b"DELETED", b"web"]:
            assert line.startswith(b"MODIFIED")
    assert await kubectl("get", "pods", "-o", "name") == ""


async def test_kubectl_finds_custom_resources_by_discovery(kubectl: Kubectl) -> None:
    thing = {"apiVersion": "example.io/v1", "kind": "Thing", "metadata": {"name": "t"}, "spec": {"a": 1}}
    await kubectl("wait", "--for=condition=Established", "crd/things.example.io", "--timeout=10s")
    await kubectl("create", "-f", "-", stdin=json.dumps(thing))
    assert "thing.example.io/t" in await kubectl("get", "things", "-o", "name")
    assert "things" in await kubectl("api-resources")


async def test_invalid_objects_of_kubectl_are_refused_by_the_server(kubectl: Kubectl) -> None:
    wrong = {**POD, "spec": {"containers": [{"name": "c", "image": "x", "imagePullPolice": "Always"}]}}
    # What newer ones ask for by themselves: Debian 12's does not.
    strictly = "/api/v1/namespaces/default/pods?fieldValidation=Strict"
    with pytest.raises(AssertionError, match=r'unknown field "spec.containers\[0\].imagePullPolice"'):
        await kubectl("create", "--raw", strictly, "-f", "-", stdin=json.dumps(wrong))
