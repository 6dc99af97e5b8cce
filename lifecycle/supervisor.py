"""Runs hooks: one task each, in dependency order, and backwards.

Needs:  the hooks with what each waits for.
Gives:  HookNode, Supervisor.

A cancel scope must be left in the task, and in the order, it was entered in. So a hook is one task that
enters its context, waits, and leaves it. All tasks live in one group inside a shielded scope, in a task of
their own: whatever is cancelled outside, every stop body runs.
"""

import asyncio
import enum
import time
from collections.abc import Callable, Sequence

import anyio

from lifecycle import hooks
from lifecycle.constructors import Constructor
from lifecycle.errors import HookTimeoutError
from lifecycle.hooks import HookSpec
from lifecycle.logs import Logger
from lifecycle.profile import Profile
from lifecycle.stacks import await_stack

__all__ = ["DEFAULT_START_TIMEOUT", "DEFAULT_STOP_TIMEOUT", "HookFailure", "HookNode", "State", "Supervisor"]

DEFAULT_START_TIMEOUT = 60.0
DEFAULT_STOP_TIMEOUT = 10.0
"""Seconds a hook may take to start and to stop when neither it nor its hive says otherwise."""


_OURS = frozenset({__file__, hooks.__file__})  # frames that say nothing about a hook


class State(enum.Enum):
    """Where a hook is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    STARTED = "started"
    STOPPING = "stopping"
    DONE = "done"


class HookNode:
    """One hook and its place among the others."""

    __slots__ = (
        "began", "leave", "limits", "module", "name", "needs", "owner", "ready", "scope", "spec", "starting",
        "state", "task", "unstarted_needs", "users", "users_left",
    )  # fmt: skip
    starting: anyio.CancelScope
    scope: anyio.CancelScope

    def __init__(
        self, spec: HookSpec, owner: Constructor, needs: Sequence["HookNode"], limits: tuple[float, float]
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.owner = owner
        self.module = owner.scope.id
        self.limits = (
            limits[0] if spec.start_timeout is None else spec.start_timeout,
            limits[1] if spec.stop_timeout is None else spec.stop_timeout,
        )
        self.needs = tuple(needs)
        self.users: list[HookNode] = []
        self.unstarted_needs = len(self.needs)
        self.users_left = 0
        self.state = State.WAITING
        self.began = 0.0
        self.ready = anyio.Event()
        self.leave = anyio.Event()
        self.task: asyncio.Task[object] | None = None
        for need in self.needs:
            need.users.append(self)
            need.users_left += 1

    def __str__(self) -> str:
        return f"hook {self.name!r} ({self.module})"


class HookFailure:
    """A hook that failed, and when in its life."""

    __slots__ = ("error", "node", "phase")

    def __init__(self, node: HookNode, phase: State, error: Exception) -> None:
        self.node = node
        self.phase = phase
        self.error = error

    def __str__(self) -> str:
        verb = {State.STARTING: "failed to start", State.STARTED: "crashed"}.get(self.phase, "failed to stop")
        if isinstance(self.error, HookTimeoutError):
            return str(self.error)
        return f"{self.node} {verb}: {type(self.error).__name__}: {self.error}"


class Supervisor:
    """Starts and stops the hooks of one hive, once."""

    def __init__(
        self,
        nodes: Sequence[HookNode],
        *,
        profile: Profile,
        log: Logger,
        on_crash: Callable[[HookFailure], None],
    ) -> None:
        self._nodes = nodes
        self._profile = profile
        self._log = log
        self._on_crash = on_crash
        self._unstarted = len(nodes)
        self.stopping = False
        self.failures: list[HookFailure] = []
        """In the order they happened, whatever the phase."""
        self.settled = anyio.Event()
        """Set when every hook has started, or all is over."""
        self.all_started = False

    async def run(self) -> None:
        """Start every hook, wait for stop(), stop every hook. Never raises what a hook raises."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for node in self._nodes:
                    if node.unstarted_needs == 0:
                        node.ready.set()
                    group.start_soon(self._live, node, name=str(node))
                self._settle_if_started()
        self.settled.set()

    def stop(self) -> None:
        """Begin to stop, against the arrows. Hooks still starting are cancelled, waiting ones never start."""
        if self.stopping:
            return
        self.stopping = True
        for node in self._nodes:
            if node.state is State.WAITING:
                node.ready.set()
            elif node.state is State.STARTING:
                node.starting.cancel()
            if node.users_left == 0:
                node.leave.set()

    async def _live(self, node: HookNode) -> None:
        """The life of a hook."""
        await node.ready.wait()
        if not self.stopping:
            node.task = asyncio.current_task()
            node.starting, node.scope = anyio.CancelScope(), anyio.CancelScope()
            node.state = State.STARTING
            node.began = time.perf_counter()
            # `starting` is what a roll-back cancels. Once the context is entered, the shield of `scope` keeps
            # a cancellation that comes a moment too late from skipping the stop.
            with node.starting, node.scope:
                try:
                    await self._enter_and_leave(node)
                except Exception as error:  # noqa: BLE001  # reported by name, with the others
                    self._fail(node, error)
        node.state = State.DONE
        for need in node.needs:
            need.users_left -= 1
            if self.stopping and need.users_left == 0:
                need.leave.set()

    async def _enter_and_leave(self, node: HookNode) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(node.limits[0], self._overdue, node)
        try:
            async with node.spec.context():
                deadline.cancel()
                node.scope.shield = True
                self._started(node)
                await node.leave.wait()
                node.state = State.STOPPING
                node.began = time.perf_counter()
                deadline = loop.call_later(node.limits[1], self._overdue, node)
            self._stopped(node)
        finally:
            deadline.cancel()

    def _started(self, node: HookNode) -> None:
        node.state = State.STARTED
        self._profile.record("start", node.name, node.module, node.began, node.owner.name)
        self._log.debug("hook started", hook=node.name, of=node.module)
        if self.stopping:
            return
        for user in node.users:
            user.unstarted_needs -= 1
            if user.unstarted_needs == 0:
                user.ready.set()
        self._unstarted -= 1
        self._settle_if_started()

    def _stopped(self, node: HookNode) -> None:
        if node.state is not State.STOPPING:  # its context swallowed the cancellation by one of its own tasks
            raise RuntimeError("its context ended while the hive was running")
        self._profile.record("stop", node.name, node.module, node.began, node.owner.name)
        self._log.debug("hook stopped", hook=node.name, of=node.module)

    def _settle_if_started(self) -> None:
        if self._unstarted == 0:
            self.all_started = True
            self.settled.set()

    def _fail(self, node: HookNode, error: Exception) -> None:
        failure = HookFailure(node, node.state, error)
        self.failures.append(failure)
        if node.state is State.STARTED and not self.stopping:
            self._on_crash(failure)
        self.stop()

    def _overdue(self, node: HookNode) -> None:
        """A deadline has passed: say who is pending and what they await, then cancel the hook."""
        starting = node.state is State.STARTING
        verb, limit = ("start", node.limits[0]) if starting else ("stop", node.limits[1])
        lines = [f"{node} did not {verb} within {limit:g} s; pending hooks:"]
        lines += [line for pending in self._nodes for line in self._pending(pending)]
        self._fail(node, HookTimeoutError("\n".join(lines)))
        (node.starting if starting else node.scope).cancel()

    def _pending(self, node: HookNode) -> list[str]:
        if node.task is not None and node.state in {State.STARTING, State.STOPPING}:
            stack = await_stack(node.task, below=_OURS)
            return [f"    {node} is {node.state.value}", *(f"        in {frame}" for frame in stack)]
        if node.state is State.WAITING and not self.stopping:
            waits = [str(need) for need in node.needs if need.state is not State.STARTED]
            return [f"    {node} waits for {', '.join(waits)}"]
        if node.state is State.STARTED and self.stopping:
            waits = [str(user) for user in node.users if user.state is not State.DONE]
            return [f"    {node} waits for {', '.join(waits)}"] if waits else []
        return []
