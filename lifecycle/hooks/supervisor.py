"""Runs hooks in dependency order, and stops them in reverse; each in a task of its own.

The task that enters a cancel scope must also leave it, in reverse order. So a hook is one task that enters
its context, waits, and leaves it. No task is inside a scope of the hive's caller: whatever is cancelled
outside, every stop runs.

Every stop is bounded: a hook past its deadline is cancelled. If it still runs (a worker thread cannot be
cancelled), it is named and left behind, and its dependencies stop; the whole stop has a budget.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, copy_context

import anyio

from lifecycle.errors import HookTimeoutError, as_failure, is_garbage_collected
from lifecycle.hooks.deadlines import Deadlines
from lifecycle.hooks.events import Events, HookEvent, HookStep
from lifecycle.hooks.nodes import HookFailure, HookNode, StartBatch, State
from lifecycle.hooks.pending import hook_stack, pending_tree
from lifecycle.hooks.phase import Phase, Progress
from lifecycle.injection.profile import Profile
from lifecycle.process.logs import Logger

__all__ = ["DEFAULT_START_TIMEOUT", "DEFAULT_STOP_BUDGET", "DEFAULT_STOP_TIMEOUT", "Supervisor"]

DEFAULT_START_TIMEOUT = 60.0
DEFAULT_STOP_TIMEOUT = 10.0
"""Seconds that a hook may take to start, and to stop, unless the hook or the hive sets a timeout."""
DEFAULT_STOP_BUDGET = 30.0
"""Seconds that all hooks together may take to stop: the grace period of a Kubernetes pod."""

GRACE = 1.0
"""Seconds until a cancelled stop is left behind."""


_inside: ContextVar["tuple[tuple[Supervisor, HookNode], ...]"] = ContextVar("hooks one runs in", default=())
"""The hook of the current task, with the hooks around the hives in which it runs."""


class Supervisor:
    """Starts and stops the hooks of one hive, once."""

    def __init__(
        self,
        nodes: Sequence[HookNode],
        *,
        profile: Profile,
        log: Logger,
        events: Events,
        phase: Phase,
        on_crash: Callable[[HookFailure], None],
        stop_budget: float = DEFAULT_STOP_BUDGET,
    ) -> None:
        self._events = events
        self._phase = phase
        self._profile = profile
        self._log = log
        self._on_crash = on_crash
        self._stop_budget = stop_budget
        self._budget: asyncio.TimerHandle | None = None
        self._deadlines: Deadlines[HookNode] = Deadlines()
        self._scope = anyio.CancelScope
        self._out_of_time = False
        self._alive = dict.fromkeys(nodes)
        self._tasks: dict[asyncio.Task[None], HookNode] = {}
        self._task: asyncio.Task[object] | None = None
        self.failures: list[HookFailure] = []
        """Failures in the order in which they happened, of all phases."""
        self.first = StartBatch(nodes, self.failures)
        """The hooks of the hive's start."""
        self.stopping = False
        self.over = anyio.Event()
        """Set after stop(), when every hook has ended or is left behind."""
        self.left: list[HookNode] = []
        """Hooks that still run although they were cancelled."""

    async def run(self) -> None:
        """Start every hook, wait for stop(), stop every hook. Never raises the error of a hook.

        It returns later than `over` is set if hooks are left behind. Cancelling its task stops the hooks.
        """
        self._task = asyncio.current_task()
        self._scope = type(anyio.CancelScope())  # cached: anyio would look it up at every call
        self._phase.look = self._progress
        self._phase.enter("starting")
        try:
            self._begin(self.first)
            self._runs_if_started()
            while not self.over.is_set():
                try:
                    await self.over.wait()
                except asyncio.CancelledError:  # the loop cancels all tasks, like asyncio.run()
                    self.stop()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release all waiters in any case, also if run() was cancelled before it began."""
        self.stopping = True
        self.over.set()
        self.first.finished.set()
        self._phase.enter("stopped")

    def start_more(self, nodes: Sequence[HookNode]) -> StartBatch:
        """Start hooks in addition to those that run. If one fails, those that started with it are stopped."""
        batch = StartBatch(nodes, [])
        self._alive |= dict.fromkeys(nodes)
        self._begin(batch)
        return batch

    def stop(self) -> None:
        """Begin to stop in reverse order. Hooks that are starting are cancelled, waiting ones never start."""
        if self.stopping:
            return
        self.stopping = True
        self._phase.enter("stopping")
        self._budget = asyncio.get_running_loop().call_later(self._stop_budget, self._budget_spent)
        self.end(self._alive, self.failures)
        self._end_if_over()

    def end(self, nodes: Iterable[HookNode], failures: list[HookFailure]) -> None:
        """Stop some hooks and all their dependents, as stop(); failures are appended as they happen."""
        nodes = list(nodes)
        for node in nodes:
            if node.ending:
                continue
            node.ending, node.failures = True, failures
            if node.state is State.WAITING:
                node.allow_start()
            elif node.state is State.STARTING:
                node.starting.cancel()
                self._deadlines.set(node, node.limits[1], self._abandon)
        for node in nodes:
            if not node.live:
                node.allow_stop()

    def hook_around(self) -> HookNode | None:
        """Return the hook that calls this or has started the calling task; in a job, the jobs' hook."""
        return next((node for supervisor, node in _inside.get() if supervisor is self), None)

    def pending(self) -> list[str]:
        """Return the tree of pending hooks, indented as a part of a message."""
        return [f"    {line}" for line in pending_tree(self._alive)]

    def _progress(self) -> Progress:
        busy = [node for node in self._alive if node.running]
        limits = [node.limits[node.state is State.STOPPING] for node in busy]
        started = sum(node.state is State.STARTED for node in self._alive)
        return Progress(
            len(self._alive), started, tuple(node.name for node in busy), max(limits, default=0.0)
        )

    def _runs_if_started(self) -> None:
        if self.first.started and not self.stopping:
            self._phase.enter("running")

    def _begin(self, batch: StartBatch) -> None:
        create, ended = asyncio.get_running_loop().create_task, self._ended
        context = copy_context()  # shared by all callbacks, which would copy it each
        for node in batch.nodes:
            if node.unstarted_needs == 0 or self.stopping:
                node.may_start = True
            node.task = task = create(self._live(node), name=str(node))
            self._tasks[task] = node
            task.add_done_callback(ended, context=context)

    async def _live(self, node: HookNode) -> None:
        """Run a hook from start to stop, whatever its code does; one coroutine, as there are thousands."""
        task = node.task
        assert task is not None  # noqa: S101  # this one
        _inside.set((*_inside.get(), (self, node)))
        node.starting, node.scope = self._scope(), self._scope()
        # A roll-back cancels `starting`. Once the context is entered, the shield of `scope` keeps a late
        # cancellation from skipping the stop.
        with node.starting, node.scope:
            try:
                while not node.may_start:
                    await node.wake_future()
                if not node.ending:
                    self._starts(node)
                    async with node.spec.context():
                        self._started(node)
                        while not node.may_stop:
                            try:
                                await node.wake_future()
                            except asyncio.CancelledError:
                                if not self._is_torn_down(node):
                                    raise
                                task.uncancel()
                        self._stops(node)
                    self._stopped(node)
            except BaseException as error:  # recorded with the hook's name
                self._deadlines.clear(node)
                if is_garbage_collected(task):
                    raise
                self._raised(node, error)
        while task.cancelling():  # cancelled by others: must not propagate to the group
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            task.uncancel()
        if not node.finished.is_set():
            self._settle(node, State.DONE)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a task, also if it was cancelled before it began or left scopes open."""
        node = self._tasks.pop(task)
        if node.finished.is_set():
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not (node.ending and task.cancelled()):
            self._fail(node, as_failure(error, str(node)))
        self._settle(node, State.DONE)

    def _is_torn_down(self, node: HookNode) -> bool:
        """Whether the loop cancels all tasks at once: stops keep their order then, too."""
        return self._task is not None and self._task.cancelling() > 0 and not node.scope.cancel_called

    def _starts(self, node: HookNode) -> None:
        node.state = State.STARTING
        node.began = time.perf_counter()
        self._deadlines.set(node, node.limits[0], self._overdue)
        self._record(node, "starting")

    def _started(self, node: HookNode) -> None:
        self._deadlines.clear(node)
        node.scope.shield = True
        node.state = State.STARTED
        took = self._profile.record("start", node.name, node.module, node.began, node.owner.name)
        self._record(node, "started", took)
        if node.ending:
            return
        for user in node.live:
            user.unstarted_needs -= 1
            if user.unstarted_needs == 0:
                user.allow_start()
        batch = node.batch
        batch.unstarted -= 1
        if not batch.unstarted:
            batch.finish_if_done()
            self._runs_if_started()

    def _stops(self, node: HookNode) -> None:
        node.state = State.STOPPING
        node.began = time.perf_counter()
        self._record(node, "stopping")
        self._deadlines.set(node, node.limits[1], self._overdue)
        if self._out_of_time:  # its stop still runs, up to its first await
            node.scope.cancel()

    def _stopped(self, node: HookNode) -> None:
        self._deadlines.clear(node)
        if node.state is State.STARTED:  # its context swallowed a cancellation by one of its own tasks
            raise RuntimeError("its context ended while the hive was running")
        took = self._profile.record("stop", node.name, node.module, node.began, node.owner.name)
        self._record(node, "stopped", took)

    def _settle(self, node: HookNode, state: State) -> None:
        """Mark a hook as ended or no longer waited for: its dependencies may stop."""
        node.state = state
        self._alive.pop(node, None)
        for need in node.needs:
            need.live.pop(node, None)
            if need.ending and not need.live:
                need.allow_stop()
        node.finished.set()
        node.batch.alive -= 1
        if not node.batch.alive:
            node.batch.finish_if_done()
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._budget is not None and not self._alive:
            self._budget.cancel()
            self.over.set()
            self._phase.enter("stopped")

    def _raised(self, node: HookNode, error: BaseException) -> None:
        """Record an error of a hook with its phase, unless the hive cancelled the hook."""
        cancelled = node.scope.cancel_called if node.scope.shield else node.starting.cancel_called
        if not (cancelled and isinstance(error, asyncio.CancelledError)):
            self._fail(node, as_failure(error, str(node)))

    def _fail(self, node: HookNode, error: Exception) -> None:
        failure = HookFailure(node, node.state, error)
        if (step := _STEPS.get(node.state)) is not None:
            self._record(node, step, error=error)
        if node.state is State.STARTING and not node.ending:
            self._profile.record_failure("start", node.name, node.module, node.began, node.owner.name)
        if node.finished.is_set():
            self._log.error("hook left behind has failed", hook=node.name, of=node.module, exc_info=error)
        elif node.ending:
            node.failures.append(failure)
        elif node.state is State.STARTED:
            self.failures.append(failure)
            self._on_crash(failure)
            self.stop()
        else:
            node.failures.append(failure)
            if node.batch is self.first:
                self.stop()
            else:
                self.end(node.batch.nodes, node.failures)

    def _record(
        self, node: HookNode, step: HookStep, took: float | None = None, error: BaseException | None = None
    ) -> None:
        self._phase.report_step()
        if error is None and step != "left behind" and not self._events.notices(took):
            return
        source = node.owner.call if node.spec.source is None else node.spec.source
        owner = node.owner.name
        self._events.emit(HookEvent(step, node.name, node.module, owner, source, took, error))

    def _overdue(self, node: HookNode) -> None:
        """Handle a passed deadline: report the pending hooks and what they await, then cancel the hook."""
        starting = node.state is State.STARTING
        verb, limit = ("start", node.limits[0]) if starting else ("stop", node.limits[1])
        beginning = f"{node} did not {verb} within {limit:g} s; pending hooks:"
        self._fail(node, HookTimeoutError("\n".join([beginning, *self.pending()])))
        if not starting:  # a failed start was cancelled with its batch
            node.scope.cancel()
            self._deadlines.set(node, GRACE, self._abandon)

    def _abandon(self, node: HookNode) -> None:
        """Name a cancelled hook that still runs and continue without it; if its start still ends, stop it."""
        if node.finished.is_set():
            return
        when = "starting" if node.state is State.STARTING else "stopping"
        lines = [f"{node} was cancelled while {when} and runs on: it is left behind"]
        lines += [f"        {line}" for line in hook_stack(node)]
        node.failures.append(HookFailure(node, node.state, HookTimeoutError("\n".join(lines))))
        self.left.append(node)
        self._record(node, "left behind")
        self._settle(node, State.LEFT)

    def _budget_spent(self) -> None:
        """Cancel all running hooks when the stop budget is used up; later stops may not wait."""
        self._out_of_time = True
        text = f"the stop budget of {self._stop_budget:g} s is spent; pending hooks:"
        error = HookTimeoutError("\n".join([text, *self.pending()]))
        self.failures.append(HookFailure(next(iter(self._alive)), State.STOPPING, error))
        for node in self._alive:
            if node.state is State.STOPPING:
                node.scope.cancel()
                self._deadlines.clear(node)
        asyncio.get_running_loop().call_later(GRACE, self._abandon_all)

    def _abandon_all(self) -> None:
        for node in [node for node in self._alive if node.running]:
            self._deadlines.clear(node)
            self._abandon(node)
        if not self.over.is_set():  # their dependencies stop now
            asyncio.get_running_loop().call_later(GRACE / 10, self._abandon_all)


_STEPS: dict[State, HookStep] = {
    State.STARTING: "failed to start",
    State.STARTED: "crashed",
    State.STOPPING: "failed to stop",
}
