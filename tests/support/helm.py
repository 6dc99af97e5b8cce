"""``helm`` as the documentation uses it: Helm's own engine and release storage behind the same command line.

python -m tests.support.helm install cilium configs/chart --namespace kube-system --values values.yaml

Debian has no ``helm``; helm-python-sdk has Helm 4's library, and this is the command around it: install,
upgrade, uninstall, template and list, with --namespace, --values, --set and --reuse-values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import helm_python
import yaml

WORDS: Final = ("NAME: {name}", "LAST DEPLOYED: {deployed_at}", "NAMESPACE: {namespace}", "STATUS: {status}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the supported command line."""
    top = argparse.ArgumentParser(prog="helm")
    commands = top.add_subparsers(dest="command", required=True)
    for name in ("install", "upgrade", "template", "uninstall", "list"):
        one = commands.add_parser(name)
        one.add_argument("-n", "--namespace", default="default")
        if name != "list":
            one.add_argument("release")
        if name in {"install", "upgrade", "template"}:
            one.add_argument("chart")
            one.add_argument("-f", "--values", action="append", default=[])
            one.add_argument("--set", action="append", default=[])
        if name == "upgrade":
            one.add_argument("--reuse-values", action="store_true")
    return top


def values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Merge the files' values, later ones over earlier ones, then those of --set."""
    found: dict[str, Any] = {}
    for path in arguments.values:
        found = _merged(found, yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {})
    for text in arguments.set:
        found = _merged(found, helm_python.parse_set_string(text))
    return found


def _merged(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(weak)
    for name, value in strong.items():
        previous = both.get(name)
        both[name] = (
            _merged(previous, value) if isinstance(previous, dict) and isinstance(value, dict) else value
        )
    return both


def summary(release: Mapping[str, Any]) -> str:
    """Return what helm prints of a release."""
    lines = [line.format(**release) for line in (*WORDS, "REVISION: {revision}")]
    notes = ["NOTES:", release["notes"].rstrip("\n")] if release.get("notes") else []
    return "\n".join([*lines, *notes, ""])


def main() -> int:
    """Run the command; print an error of Helm's as one line on standard error and return 1."""
    arguments = parser().parse_args()
    try:
        return run(arguments)
    except helm_python.HelmError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1


def run(arguments: argparse.Namespace) -> int:
    """Execute a parsed command. Raises HelmError."""
    if arguments.command == "template":
        chart = helm_python.Chart.load(arguments.chart)
        given = values(arguments)
        chart.validate_schema(given)
        found = chart.render(given, name=arguments.release, namespace=arguments.namespace)
        for name, text in sorted(found.items()):
            if name.endswith(".yaml") and text.strip():
                sys.stdout.write(f"---\n# Source: {name}\n{text.strip()}\n")
        return 0
    with helm_python.Config(namespace=arguments.namespace) as cluster:
        match arguments.command:
            case "install":
                made = cluster.install(arguments.chart, arguments.release, values(arguments))
                sys.stdout.write(summary(made))
            case "upgrade":
                made = cluster.upgrade(
                    arguments.chart,
                    arguments.release,
                    values(arguments),
                    reuse_values=arguments.reuse_values,
                )
                sys.stdout.write(f'Release "{arguments.release}" has been upgraded. Happy Helming!\n')
                sys.stdout.write(summary(made))
            case "uninstall":
                cluster.uninstall(arguments.release)
                sys.stdout.write(f'release "{arguments.release}" uninstalled\n')
            case "list":
                for one in cluster.list():
                    sys.stdout.write(
                        f"{one['name']}\t{one['namespace']}\t{one['revision']}\t{one['status']}\n"
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
