"""One graph of constructors, built by ours, dishka, dependency-injector (manual), and plain Python.

Every round has new classes: a daemon reads each type hint once.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """The dependencies: each constructor on up to three earlier ones, the root on all that no other needs."""

    needs: tuple[tuple[int, ...], ...]
    code: CodeType

    @classmethod
    def of(cls, size: int) -> Shape:
        """Return a shape of this number of constructors, always the same."""
        chance = random.Random(size)  # noqa: S311  # a shape, no secret
        needs = [tuple(sorted(chance.sample(range(i), min(i, chance.randrange(4))))) for i in range(size - 1)]
        unneeded = set(range(size - 1)).difference(*needs)
        needs.append(tuple(sorted(unneeded)))
        lines = []
        for number, found in enumerate(needs):
            parameters = "".join(f", c{need}: C{need}" for need in found)
            lines.append(f"class C{number}:\n    def __init__(self{parameters}) -> None:\n        pass\n")
        return cls(tuple(needs), compile("\n".join(lines), "graph.py", "exec"))

    def classes(self) -> list[type]:
        """Return new classes of this shape."""
        names: dict[str, object] = {"__name__": __name__}
        exec(self.code, names)  # noqa: S102  # made above, of numbers
        return [kind for number in range(len(self.needs)) if isinstance(kind := names[f"C{number}"], type)]


@dataclass(frozen=True, slots=True)
class Built:
    """Time of building in ms, and a function that looks up an instance, with its time in µs."""

    check: float
    construct: float
    resolve: float


RESOLVED = 2000


def ours(shape: Shape) -> Built:
    """Build a hive: it reports every fault, builds everything in order, and records times and names."""
    from lifecycle import Hive, invoke, provide

    classes = shape.classes()
    root = classes[-1]

    def check() -> Hive:
        hive = Hive(provide(*classes), invoke(root))
        hive.check()
        return hive

    checked, hive = timed(check)
    built, _ = timed(hive._construct)
    return Built(checked, built, resolved(lambda: hive.get(root)))


def dishka(shape: Shape) -> Built:
    """Build a container with validation; it builds on the first request for the root."""
    from dishka import Provider, Scope, make_container

    classes = shape.classes()
    root = classes[-1]

    def check() -> object:
        provider = Provider(scope=Scope.APP)
        for kind in classes:
            provider.provide(kind)
        return make_container(provider)

    checked, container = timed(check)
    get = container.get  # type: ignore[attr-defined]  # the container made above
    built, _ = timed(lambda: get(root))
    return Built(checked, built, resolved(lambda: get(root)))


def dependency_injector(shape: Shape) -> Built:
    """Build from explicit providers: no hints, no checks; in order, as deep chains recurse."""
    from dependency_injector.containers import DynamicContainer
    from dependency_injector.providers import Singleton

    classes = shape.classes()

    def compose() -> list[Singleton[object]]:
        container = DynamicContainer()
        providers: list[Singleton[object]] = []
        for number, kind in enumerate(classes):
            needs = {f"c{need}": providers[need] for need in shape.needs[number]}
            provider = Singleton(kind, **needs)
            container.set_provider(f"p{number}", provider)
            providers.append(provider)
        return providers

    composed, providers = timed(compose)
    built, _ = timed(lambda: [provider() for provider in providers])
    return Built(composed, built, resolved(providers[-1]))


def plain(shape: Shape) -> Built:
    """Build by calls in the right order and a dict, as a person would write it."""
    classes = shape.classes()
    made: dict[type, object] = {}

    def construct() -> None:
        for number, kind in enumerate(classes):
            made[kind] = kind(*[made[classes[need]] for need in shape.needs[number]])

    built, _ = timed(construct)
    return Built(0.0, built, resolved(lambda: made[classes[-1]]))


BUILDERS: dict[str, Callable[[Shape], Built]] = {
    "ours": ours,
    "dishka": dishka,
    "dependency-injector (manual)": dependency_injector,
    "plain Python": plain,
}


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage first, and disable the collector meanwhile: no round pays for another one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return the ms of processor time of a call, and its result."""
    with collected():
        began = time.process_time()
        result = work()
        return (time.process_time() - began) * 1000, result


def resolved(get: Callable[[], object]) -> float:
    """Return the µs of looking up an existing instance."""
    took, _ = timed(lambda: [get() for _ in range(RESOLVED)])
    return took * 1000 / RESOLVED
