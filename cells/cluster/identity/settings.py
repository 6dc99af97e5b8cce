"""Which labels make identities, and whether well-known ones have numbers of their own.

Needs: LabelFilter.   Gives: IdentitySettings, configured_filter().
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from cells.cluster.identity.filter import DEFAULT_RULES, LabelFilter, Rule, parse_rule, read_rules
from lifecycle import Hook, Lifecycle, Logger, Settings, refuse

SHOWN: Final = 100
"""Characters of a rule that an error repeats."""


class IdentitySettings(Settings, frozen=True):
    """Which labels make up identities."""

    labels: str = ""
    """Rules for labels that make up identities, added to the default ones: [!][source:]regex, separated by
    spaces or commas. If any rule includes labels, only included labels count."""

    label_prefix_file: str = ""
    """JSON file with rules that replace the default ones."""

    enable_well_known_identities: bool = False
    """Give the cluster's DNS servers and Cilium's pods fixed identities, 100 to 115."""

    k8s_namespace: str = ""
    """Namespace of Cilium's own pods, for well-known identities and the Leases of announced services; empty:
    default."""

    def validate(self) -> None:
        """Refuse rules that are none; raises ValueErrors of one line."""
        refuse(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for text in self.rules():
            try:
                parse_rule(text)
            except ValueError as error:
                yield f"labels={text if len(text) <= SHOWN else f'{text[:SHOWN]}...'}: {error}"
        if self.label_prefix_file and not PurePosixPath(self.label_prefix_file).is_absolute():
            yield f"label-prefix-file={self.label_prefix_file[:SHOWN]}: expected an absolute path, or nothing"

    def rules(self) -> list[str]:
        """The rules of ``labels``, each as it is written."""
        return [text for text in re.split(r"[,\s]+", self.labels) if text]


def configured_filter(settings: IdentitySettings, *, lifecycle: Lifecycle, log: Logger) -> LabelFilter:
    """The filter by the settings; the file is read by its hook."""
    added = [parse_rule(text) for text in settings.rules()]
    chosen = LabelFilter()

    async def read() -> None:
        path = settings.label_prefix_file
        base: tuple[Rule, ...] = read_rules(Path(path)) if path else DEFAULT_RULES
        included = [one for one in (*added, *(base if path else ())) if not one.ignored]
        chosen.use((*base, *added), only_included=bool(included))
        if not chosen.keeps_reserved:
            log.error(
                "reserved:.* is not among the labels that make identities, nothing works without it",
                path=path,
            )
        if path or added:
            log.info("labels make identities by these rules", rules=[str(one) for one in chosen.rules])

    lifecycle.append(Hook("read label rules", read))
    return chosen
