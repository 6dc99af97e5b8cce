"""The order of hooks, from the dependencies of the constructors that registered them."""

import itertools
from collections.abc import Collection, Iterable, Mapping

from lifecycle.hooks.hooks import HookSpec, Lifecycle
from lifecycle.hooks.nodes import HookNode
from lifecycle.injection.constructors import Constructor
from lifecycle.jobs.jobs import Jobs

__all__ = ["Wiring"]


class Wiring:
    """The hooks of one hive; added and removed with the instances that register them.

    `limits` are the start and stop timeouts, in seconds, of hooks without their own. With `sequential`, each
    hook waits for the one before it.
    """

    def __init__(self, limits: tuple[float, float], *, sequential: bool) -> None:
        self._limits = limits
        self._sequential = sequential
        self._numbers: dict[HookNode, int] = {}
        self._count = 0
        self._by_constructor: dict[Constructor, list[HookNode]] = {}
        self._last: dict[Constructor, Collection[HookNode]] = {}
        """The hooks after which a constructor counts as started."""

    def add(
        self,
        owners: Iterable[Constructor],
        lifecycles: Mapping[Constructor, Lifecycle],
        jobs: Mapping[Constructor, Jobs],
    ) -> list[HookNode]:
        """Create the new hooks of these owners, in order, each after the hooks that it waits for."""
        added = []
        for owner in owners:
            if owner in self._last:
                continue
            specs = list(lifecycles[owner].specs) if owner in lifecycles else []
            if owner in jobs:
                drain = jobs[owner].drain
                limit = self._limits[1] + drain if drain else None
                specs.append(HookSpec(f"jobs of {owner.name}", jobs[owner].running, stop_timeout=limit))
            below = [last for need in owner.needs.values() if (last := self._last[need])]
            needs = below[0] if len(below) == 1 else {node for nodes in below for node in nodes}
            for spec in specs:
                if self._sequential and self._numbers:
                    needs = {*needs, next(reversed(self._numbers))}
                if len(needs) > 1:
                    needs = sorted(needs, key=self._numbers.__getitem__)
                node = HookNode(spec, owner, needs, self._limits)
                self._numbers[node] = self._count
                self._count += 1
                self._by_constructor.setdefault(owner, []).append(node)
                needs = (node,)
                added.append(node)
            self._last[owner] = needs
        return added

    def remove(self, owners: Iterable[Constructor]) -> list[HookNode]:
        """Remove the hooks of these owners and return them in order.

        All that need an owner must be given with it.
        """
        removed: dict[HookNode, int] = {}
        for owner in owners:
            self._last.pop(owner, None)
            removed |= {node: self._numbers.pop(node) for node in self._by_constructor.pop(owner, ())}
        hooks = sorted(removed, key=removed.__getitem__)
        if self._sequential:
            for before, after in itertools.pairwise(hooks):
                after.follow(before)
        for node in reversed(hooks):
            for user in [user for user in node.live if user not in removed]:
                node.bypass(user)
        return hooks
