"""Runs ``hive policy`` over folders of manifests."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from hive.main import cli

SHOP = Path(__file__).parents[3] / "docs" / "examples" / "shop"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["policy", *map(str, arguments)], standalone_mode=False)


def write(folder: Path, text: str) -> Path:
    (folder / "pods.yaml").write_text((SHOP / "pods.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "policy.yaml").write_text(text, encoding="utf-8")
    return folder


def cnp(spec: str, name: str = "p") -> str:
    head = f"apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\nmetadata: {{name: {name}, namespace: shop}}"
    return f"{head}\nspec:\n{spec}"
