"""Loads a compiled object and tries it on packets, before any of it is in force.

For:    Datapath. Needs: libbpf, the trial, the node's maps.
Gives:  load_tried(), WrongObjectError.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from cells.datapath.generation import Constants, load
from cells.datapath.libbpf import LoadError
from cells.datapath.programs import ENTRIES
from cells.datapath.settings import DatapathSettings
from cells.datapath.trial.selfcheck import lent, self_check, try_packets
from cells.maps import Map
from lifecycle import UsageError

PARTS: Final = ({"hive_from_pod"}, ENTRIES.keys() - {"hive_from_pod"})
"""Loaded at the same time: the verifier takes as long over what a pod sends as over all the others."""


class WrongObjectError(LoadError, UsageError):
    """The setting ``datapath-object`` names something else than a datapath of this agent."""

    def __init__(self, path: Path, error: LoadError) -> None:
        super().__init__(
            f"datapath-object={path}: {error}; expected a datapath compiled for this agent, or leave it out"
        )
        self.log = error.log


def load_tried(
    data: bytes,
    name: str,
    tables: tuple[Map, ...],
    generation: int,
    settings: DatapathSettings,
    parts: ExitStack,
    *,
    first: bool,
) -> tuple[dict[str, int], Constants]:
    """Load the programs onto the node's maps and try them on packets; descriptors by name, and constants.

    ``parts`` closes the programs. Verifying takes longest, so two threads load. Raises LoadError, also if the
    programs fail the check; nothing is in force then.
    """
    with ExitStack() as borrowed:
        own = borrowed.enter_context(lent(tables)) if first else None
        with ThreadPoolExecutor(2) as both:
            loading = [both.submit(load, data, name, tables, generation, settings, each) for each in PARTS]
            check = None if own is not None else both.submit(self_check, data, name, tables, settings)
        for each in loading:
            if each.exception() is None:
                parts.enter_context(each.result()[0])
        loaded = [each.result() for each in loading]
        programs = {known: fd for part, _ in loaded for known, fd in part.programs().items()}
        if own is not None:
            try_packets(programs, own, name)
        elif check is not None:
            check.result()
    return programs, loaded[0][1]
