"""Builds, without a network, an image of one static program that waits, for the runtimes of tests."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

PAUSE = "int pause(void); int main(void) { for (;;) pause(); }\n"
IMAGE = "docker.io/test/pause:1"


def pause_image(folder: Path) -> Path:
    """Write a docker archive of :data:`IMAGE` into ``folder``."""
    (folder / "pause.c").write_text(PAUSE)
    subprocess.run(
        ["musl-gcc", "-static", "-Os", "-s", "-o", folder / "pause", folder / "pause.c"],
        check=True,
        timeout=60,
    )
    layer = tar({"pause": (folder / "pause").read_bytes()}, mode=0o755)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    archive = folder / "pause.tar"
    archive.write_bytes(
        tar({name: config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()})
    )
    return archive


def tar(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """Return an uncompressed tar of ``files``, reproducible byte by byte."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
