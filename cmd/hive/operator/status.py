"""``hive operator status``: the leader, and the health of an operator."""

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import click

from hive.output import fact_lines, output_option, shown_as_document, terminal_width

DEFAULT = "localhost:9234"


@click.command()
@click.option(
    "-s",
    "--server",
    default=DEFAULT,
    show_default=True,
    envvar="CILIUM_OPERATOR_API_SERVE_ADDR",
    metavar="HOST:PORT",
    help="The operator's address: its operator-api-serve-addr.",
)
@click.option("--timeout", type=float, default=5.0, show_default=True, help="Seconds to wait for an answer.")
@output_option
def status(server: str, timeout: float, output: str) -> None:
    """Show whether a running operator is healthy, and the leader. Exits 1 if a part is not healthy."""
    answer = asked(server, timeout)
    if shown_as_document(answer, output):
        return
    for line in fact_lines(facts(answer), terminal_width()):
        click.echo(line)
    if answer["healthz"] != "ok" or any(one["level"] == "degraded" for one in answer["modules"]):
        raise click.exceptions.Exit(1)


def facts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Yield name and text of every line."""
    leads = "this operator" if answer["leads"] else answer["leader"] or "no replica yet"
    found = [
        ("Operator:", answer["identity"]),
        ("Leader:", leads),
        ("API server:", f"{answer['server']}  {answer['healthz']}"),
    ]
    modules: list[dict[str, Any]] = answer["modules"]
    wrong = [one for one in modules if one["level"] == "degraded"]
    well = sum(one["level"] == "ok" for one in modules)
    found.append(("Modules:", f"{well} well, {len(wrong)} degraded"))
    for one in wrong:
        why = one.get("error") or ""
        found.append((f"  {one['module']}:", f"{one['message']} {why}".strip()))
    return found


def asked(server: str, timeout: float) -> dict[str, Any]:
    """Return the operator's status, with the result of its health check. Raises ClickException."""
    where = f"http://{server if not server.startswith(':') else 'localhost' + server}"
    try:
        with urlopen(f"{where}/hive/status", timeout=timeout) as answer:  # noqa: S310  # http, as given
            found: dict[str, Any] = json.load(answer)
        return {**found, "healthz": _healthz(where, timeout)}
    except (URLError, TimeoutError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise click.ClickException(
            f"no operator answers at {server} ({reason}): is it running, and is this its"
            " operator-api-serve-addr?"
        ) from error
    except ValueError as error:
        raise click.ClickException(f"{server} did not answer like an operator: {error}") from error


def _healthz(where: str, timeout: float) -> str:
    try:
        with urlopen(f"{where}/healthz", timeout=timeout + 5) as answer:  # noqa: S310
            text: bytes = answer.read()
    except HTTPError as error:
        text = error.read()
    return text.decode("utf-8", "replace").strip()
