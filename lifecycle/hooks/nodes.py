"""A hook among the others: what it waits for, who waits for it, where in its life it is."""

import asyncio
import enum
from collections.abc import Iterable, Sequence

import anyio

from lifecycle.errors import ExitRequestedError, HookTimeoutError, described
from lifecycle.hooks.deadlines import Flag
from lifecycle.hooks.hooks import HookSpec
from lifecycle.injection.constructors import Constructor

__all__ = ["HookFailure", "HookNode", "State", "Wave", "sentence"]


class State(enum.Enum):
    """Where a hook is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    STARTED = "started"
    STOPPING = "stopping"
    DONE = "done"
    LEFT = "left behind"
    """Cancelled, but still running: it is no longer waited for."""


class HookNode:
    """One hook and its place among the others."""

    __slots__ = (
        "began", "ending", "failures", "finished", "limits", "live", "may_start", "may_stop", "module",
        "name", "needs", "owner", "scope", "spec", "starting", "state", "task", "unstarted_needs", "waiter",
        "wave",
    )  # fmt: skip
    # quoted, as elsewhere: anyio imports a name once it is asked for, and only a hive that runs needs these
    starting: "anyio.CancelScope"
    scope: "anyio.CancelScope"
    wave: "Wave"
    failures: "list[HookFailure]"
    """Where its failures go: to those who wait for its start, or its end."""

    def __init__(
        self, spec: HookSpec, owner: Constructor, needs: Iterable["HookNode"], limits: tuple[float, float]
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.owner = owner
        self.module = owner.scope.id
        self.limits = (
            limits
            if spec.start_timeout is None and spec.stop_timeout is None
            else (
                limits[0] if spec.start_timeout is None else spec.start_timeout,
                limits[1] if spec.stop_timeout is None else spec.stop_timeout,
            )
        )
        """Seconds to start and to stop; a tuple that most hooks share."""
        self.needs = tuple(needs)
        self.live: dict[HookNode, None] = {}
        """Users that are not over yet, in order."""
        self.unstarted_needs = len(self.needs)
        self.state = State.WAITING
        self.ending = False
        """Whether it has been asked to end."""
        self.began = 0.0
        self.may_start = self.may_stop = False
        """Whether all that it needs has started, and all that needs it is over."""
        self.waiter: asyncio.Future[None] | None = None
        """What its task waits for one of them with."""
        self.finished = Flag()
        """Set when it is over, or left behind."""
        self.task: asyncio.Task[object] | None = None
        for need in self.needs:
            need.live[self] = None

    def __str__(self) -> str:
        return f"hook {self.name!r} ({self.module})"

    @property
    def running(self) -> bool:
        """Whether its start or its stop is going on."""
        return self.state in {State.STARTING, State.STOPPING}

    @property
    def held_up_by(self) -> list["HookNode"]:
        """What it waits for: to have started, or to have stopped."""
        if self.state is State.WAITING and not self.ending:
            return [need for need in self.needs if need.state is not State.STARTED]
        if self.state is State.STARTED and self.ending:
            return list(self.live)
        return []

    def allow_start(self) -> None:
        """What it needs has started, or it is to end without a start."""
        self.may_start = True
        self._wake()

    def allow_stop(self) -> None:
        """What needs it is over."""
        self.may_stop = True
        self._wake()

    def woken(self) -> "asyncio.Future[None]":
        """To be awaited by its task: done at the next of these."""
        assert self.task is not None  # noqa: S101  # the one that asks
        self.waiter = waiter = self.task.get_loop().create_future()
        return waiter

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def follow(self, need: "HookNode") -> None:
        """Stop before this one, though both have started already."""
        if need not in self.needs:
            self.needs = (*self.needs, need)
            need.live[self] = None

    def bypass(self, user: "HookNode") -> None:
        """Let a user that has started follow on what this one needs instead of on this one."""
        del self.live[user]
        user.needs = tuple(need for need in user.needs if need is not self)
        for need in self.needs:
            user.follow(need)


_FAILED = {
    State.WAITING: "did not start",
    State.STARTING: "failed to start",
    State.STARTED: "crashed",
    State.STOPPING: "failed to stop",
}


class HookFailure:
    """A hook that failed, and when in its life."""

    __slots__ = ("error", "node", "phase")

    def __init__(self, node: HookNode, phase: State, error: Exception) -> None:
        self.node = node
        self.phase = phase
        self.error = error

    def __str__(self) -> str:
        verb = _FAILED[self.phase]
        if isinstance(self.error, HookTimeoutError | ExitRequestedError):
            return str(self.error)
        return f"{self.node} {verb}: {described(self.error)}"


class Wave:
    """Hooks that start together, or not at all."""

    def __init__(self, nodes: Sequence[HookNode], failures: list[HookFailure]) -> None:
        self.nodes = nodes
        self.failures = failures
        self.unstarted = self.alive = len(nodes)
        self.settled = anyio.Event()
        """Set when every hook has started, or all are over."""
        for node in nodes:
            node.wave, node.failures = self, failures
            if node.needs:
                node.unstarted_needs = sum(need.state is not State.STARTED for need in node.needs)
        self.settle()

    @property
    def started(self) -> bool:
        """Whether every hook has started."""
        return self.unstarted == 0

    def settle(self) -> None:
        """Wake the waiting tasks when there is nothing more to wait for."""
        if self.unstarted == 0 or self.alive == 0:
            self.nodes = ()  # the hive may outlive some of them by far
            self.settled.set()


def sentence(beginning: str, parts: Iterable[object]) -> str:
    """A message with one fault, or with a line for each."""
    texts = [str(one) for one in parts]
    return f"{beginning}: {texts[0]}" if len(texts) == 1 else "\n- ".join((f"{beginning}:", *texts))
