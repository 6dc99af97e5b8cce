"""Loads the maps and programs of a new node while Python imports the agent's cells.

The verifier takes a quarter of a cold start, on a CPU that Python does not use. Nothing is pinned or
attached: the start, once it has claimed the node, takes the objects that equal those it would create, and
closes the others.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from cells.datapath.generation import read_object
from cells.datapath.settings import PACKAGED_OBJECTS
from cells.datapath.trial import Preloaded, PreloadedPrograms, load_tried
from cells.maps.map import Map, create_map
from cells.maps.node_maps import PreparedMaps, node_specs, placeholder_spec
from hive.agent.forecast import Forecast, forecast
from lifecycle import Cell, Sources, supply

FIRST_GENERATION = 1


def preload(sources: Sources) -> tuple[PreparedMaps, PreloadedPrograms] | None:
    """Start to load the maps and programs of an agent with these settings; None if the node has maps or
    settings are invalid.
    """
    wanted = forecast(sources)
    if wanted is None or not is_new(wanted):
        return None
    worker = ThreadPoolExecutor(1, "preload")
    made = worker.submit(make_maps, wanted)
    programs = worker.submit(load_programs, wanted, made)
    worker.shutdown(wait=False)
    return PreparedMaps(made), PreloadedPrograms(programs)


def preloading(sources: Sources) -> Sequence[Cell]:
    """Return the preloaded objects as cells for the agent's hive; none if nothing is loaded."""
    return tuple(map(supply, preload(sources) or ()))


def is_new(wanted: Forecast) -> bool:
    """Whether nothing is pinned in the directories of our and Cilium's agent."""
    places = (wanted.agent.globals_dir, wanted.agent.programs_dir)
    return not any(place.is_dir() and any(place.iterdir()) for place in places)


def make_maps(wanted: Forecast) -> tuple[Map, ...]:
    """Create all maps or their placeholders. Raises BpfError, after closing all."""
    with ExitStack() as parts:
        made = []
        for attribute, full in node_specs(wanted.maps).items():
            spec = full if attribute in wanted.used else placeholder_spec(full)
            table = parts.enter_context(create_map(spec))
            table.spec = spec
            made.append(table)
        parts.pop_all()
    return tuple(made)


def load_programs(wanted: Forecast, made: Future[tuple[Map, ...]]) -> Preloaded:
    """Load programs through the verifier, and test-run them. Raises HiveError and OSError."""
    path = wanted.programs.datapath_object or PACKAGED_OBJECTS / "datapath.o"
    tables, data = made.result(), read_object(path)
    with ExitStack() as parts:
        found = load_tried(data, path.name, tables, FIRST_GENERATION, wanted.programs, parts, first=True)
        return parts.pop_all(), frozenset(table.id for table in tables), *found
