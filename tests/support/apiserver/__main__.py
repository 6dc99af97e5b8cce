"""The fake API server alone: ``python -m tests.support.apiserver --kubeconfig FILE``."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import yaml

from tests.support.apiserver.certificates import Authority
from tests.support.apiserver.exec import by_program, conversing_program
from tests.support.apiserver.server import ADMIN_TOKEN, ApiServer


def kubeconfig(url: str, ca: Path | None, token: str = ADMIN_TOKEN) -> str:
    """A kubeconfig for the server; one without TLS has no authority."""
    cluster = {"server": url} | ({"certificate-authority": str(ca)} if ca is not None else {})
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "clusters": [{"name": "stand-in", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "stand-in", "context": {"cluster": "stand-in", "user": "admin"}}],
        }
    )


async def serve(arguments: argparse.Namespace) -> None:
    """Until interrupted, or asked to end: the keys go with it."""
    server = ApiServer()
    server.executor = by_program(arguments.exec) if arguments.exec else None
    server.conversation = conversing_program(arguments.exec) if arguments.exec else None
    if arguments.logs:
        server.logs = lambda asked: (arguments.logs / f"{asked.pod}-{asked.container}.log").read_bytes()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    if arguments.later:
        texts = arguments.later.read_text().split("\n\n")
        later = iter([[json.loads(line) for line in text.splitlines()] for text in texts])
        loop.add_signal_handler(signal.SIGUSR1, lambda: [server.add(one) for one in next(later, ())])
    for path in arguments.objects:
        for document in yaml.safe_load_all(Path(path).read_text()):  # noqa: ASYNC240  # before it serves
            if document:
                server.add(document)
    with ExitStack() as stack:
        certificate, tls = None, None
        if not arguments.plain:
            authority = Authority(Path(stack.enter_context(tempfile.TemporaryDirectory())), arguments.host)
            certificate, tls = authority.certificate, authority.serving()
        async with server.serving(host=arguments.host, port=arguments.port, tls=tls) as url:
            if arguments.kubeconfig:
                text = kubeconfig(url, certificate)
                Path(arguments.kubeconfig).write_text(text)  # noqa: ASYNC240
            sys.stdout.write(f"{url} token={ADMIN_TOKEN}{f' ca={certificate}' if certificate else ''}\n")
            sys.stdout.flush()
            await over.wait()


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.apiserver", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="the address to serve at")
    parser.add_argument("--port", type=int, default=0, help="its port; 0 for any")
    parser.add_argument("--plain", action="store_true", help="HTTP; kubectl sends its token over TLS only")
    parser.add_argument("--kubeconfig", help="file to write a kubeconfig to")
    parser.add_argument("--exec", help="a program for NAMESPACE POD CONTAINER COMMAND... of pods/exec")
    parser.add_argument("--logs", type=Path, help="a folder of POD-CONTAINER.log, for pods/log")
    parser.add_argument("--objects", nargs="*", default=[], help="YAML files of objects to begin with")
    parser.add_argument(
        "--later",
        type=Path,
        help="a file of objects, one a line: those up to a blank line come at once, by a SIGUSR1",
    )
    try:
        asyncio.run(serve(parser.parse_args()))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
