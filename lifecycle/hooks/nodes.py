"""A hook in the order of hooks: its dependencies, its dependents and its state."""

import asyncio
import enum
from collections.abc import Iterable, Sequence

import anyio

from lifecycle.errors import ExitRequestedError, HookTimeoutError, described
from lifecycle.hooks.deadlines import Flag
from lifecycle.hooks.hooks import HookSpec
from lifecycle.injection.constructors import Constructor

__all__ = ["HookFailure", "HookNode", "StartBatch", "State", "sentence"]


class State(enum.Enum):
    """The state of a hook."""

    WAITING = "waiting"
    STARTING = "starting"
    STARTED = "started"
    STOPPING = "stopping"
    DONE = "done"
    LEFT = "left behind"
    """Cancelled but still running; no longer waited for."""


class HookNode:
    """One hook with its dependencies and dependents."""

    __slots__ = (
        "batch",
        "began",
        "ending",
        "failures",
        "finished",
        "limits",
        "live",
        "may_start",
        "may_stop",
        "module",
        "name",
        "needs",
        "owner",
        "scope",
        "spec",
        "starting",
        "state",
        "task",
        "unstarted_needs",
        "waiter",
    )  # fmt: skip
    # quoted: anyio imports names on access, and only a running hive needs these
    starting: "anyio.CancelScope"
    scope: "anyio.CancelScope"
    batch: "StartBatch"
    failures: "list[HookFailure]"
    """Receives its failures: the waiters for its start, or for its end."""

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
        """Dependents that have not ended, in order."""
        self.unstarted_needs = len(self.needs)
        self.state = State.WAITING
        self.ending = False
        """Whether it must stop."""
        self.began = 0.0
        self.may_start = self.may_stop = False
        """Whether all its dependencies have started and all its dependents have ended."""
        self.waiter: asyncio.Future[None] | None = None
        """The future that its task awaits."""
        self.finished = Flag()
        """Set when it has ended or is left behind."""
        self.task: asyncio.Task[object] | None = None
        for need in self.needs:
            need.live[self] = None

    def __str__(self) -> str:
        return f"hook {self.name!r} ({self.module})"

    @property
    def running(self) -> bool:
        """Whether its start or stop is in progress."""
        return self.state in {State.STARTING, State.STOPPING}

    @property
    def blocked_by(self) -> list["HookNode"]:
        """The hooks that it waits for: to start, or to stop."""
        if self.state is State.WAITING and not self.ending:
            return [need for need in self.needs if need.state is not State.STARTED]
        if self.state is State.STARTED and self.ending:
            return list(self.live)
        return []

    def allow_start(self) -> None:
        """Let it start, or end without a start: all its dependencies have started."""
        self.may_start = True
        self._wake()

    def allow_stop(self) -> None:
        """Let it stop: all its dependents have ended."""
        self.may_stop = True
        self._wake()

    def wake_future(self) -> "asyncio.Future[None]":
        """Return a future for its task, done at the next of these calls."""
        assert self.task is not None  # noqa: S101  # the one that asks
        self.waiter = waiter = self.task.get_loop().create_future()
        return waiter

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def follow(self, need: "HookNode") -> None:
        """Stop before another hook, although both have started."""
        if need not in self.needs:
            self.needs = (*self.needs, need)
            need.live[self] = None

    def bypass(self, user: "HookNode") -> None:
        """Make a started dependent depend on this hook's dependencies instead of on this hook."""
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
    """The failure of a hook, and in which phase."""

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


class StartBatch:
    """Hooks that start together or not at all."""

    def __init__(self, nodes: Sequence[HookNode], failures: list[HookFailure]) -> None:
        self.nodes = nodes
        self.failures = failures
        self.unstarted = self.alive = len(nodes)
        self.finished = anyio.Event()
        """Set when every hook has started, or all have ended."""
        for node in nodes:
            node.batch, node.failures = self, failures
            if node.needs:
                node.unstarted_needs = sum(need.state is not State.STARTED for need in node.needs)
        self.finish_if_done()

    @property
    def started(self) -> bool:
        """Whether every hook has started."""
        return self.unstarted == 0

    def finish_if_done(self) -> None:
        """Wake the waiting tasks if nothing is pending."""
        if self.unstarted == 0 or self.alive == 0:
            self.nodes = ()  # release the nodes: the hive may outlive them
            self.finished.set()


def sentence(beginning: str, parts: Iterable[object]) -> str:
    """Return a message with one fault, or with one line for each of several."""
    texts = [str(part) for part in parts]
    return f"{beginning}: {texts[0]}" if len(texts) == 1 else "\n- ".join((f"{beginning}:", *texts))
