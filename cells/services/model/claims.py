"""Who wants which address to be served, and what is served of it.

Gives: Claims; Upsert, Delete, FrontendChange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from cells.services import BackendState, Frontend, FrontendKey, ServiceAddress, ServiceName, ServiceType

__all__ = ["Delete", "FrontendChange", "Upsert"]


class Upsert(NamedTuple):
    """A frontend that is to be served as it says."""

    frontend: Frontend


class Delete(NamedTuple):
    """A frontend that is to be served no more."""

    key: FrontendKey


FrontendChange = Upsert | Delete


class Claims:
    """Frontends by address, each of one or several owners, and what was said of them by hand.

    A frontend that several claim is served for one of them until that claim goes. What is said by hand holds
    until an owner says something else of the same frontend. The state that a backend was given manually holds
    until no frontend has the backend any more.
    """

    def __init__(self) -> None:
        self._claims: dict[FrontendKey, dict[ServiceName, Frontend]] = {}
        self._claimed: dict[ServiceName, tuple[FrontendKey, ...]] = {}
        self._manual: dict[FrontendKey, Frontend | None] = {}
        """None: not served, whoever claims it."""
        self._states: dict[ServiceAddress, BackendState] = {}
        self.contested: dict[FrontendKey, tuple[ServiceName, ...]] = {}
        """Frontends that several services claim: the one that is served, then those that are not."""

    def replace(self, owner: ServiceName, frontends: Iterable[Frontend]) -> Iterator[FrontendChange]:
        """The frontends that one owner claims are these from now on."""
        wanted = {frontend.key: frontend for frontend in frontends}
        for key in self._claimed.get(owner, ()):
            if key not in wanted:
                before = self._served(key)
                self._manual.pop(key, None)
                claims = self._claims[key]
                del claims[owner]
                if not claims:
                    del self._claims[key]
                self._contest(key, claims)
                yield from self._change(key, before)
        if wanted:
            self._claimed[owner] = tuple(wanted)
        else:
            self._claimed.pop(owner, None)
        for key, frontend in wanted.items():
            held = self._claims.get(key)
            if held is None and key not in self._manual and not self._states:
                self._claims[key] = {owner: frontend}
                yield Upsert(frontend)
                continue
            before = self._served(key)
            claims = self._claims.setdefault(key, {})
            if claims.get(owner) != frontend:
                self._manual.pop(key, None)
                claims[owner] = frontend
                self._contest(key, claims)
            yield from self._change(key, before)
        self._forget_states()

    def override(self, key: FrontendKey, frontend: Frontend | None) -> Iterator[FrontendChange]:
        """Serve this by hand, or with None nothing, whoever claims the frontend."""
        before = self._served(key)
        self._manual[key] = frontend
        yield from self._change(key, before)
        self._forget_states()

    def clear_override(self, key: FrontendKey) -> Iterator[FrontendChange]:
        """Serve again who claims the frontend."""
        before = self._served(key)
        self._manual.pop(key, None)
        yield from self._change(key, before)
        self._forget_states()

    def set_state(self, address: ServiceAddress, state: BackendState) -> Iterator[FrontendChange]:
        """Give a backend a state manually, wherever it serves; one that nobody has is left alone."""
        having = [key for key in self._keys() if self._has(key, address)]
        before = {key: self._served(key) for key in having}
        if having:
            self._states[address] = state
        for key, old in before.items():
            yield from self._change(key, old)

    def _contest(self, key: FrontendKey, claims: Mapping[ServiceName, Frontend]) -> None:
        """Note whether several services claim it. That a redirect stands before its service is no contest."""
        self.contested.pop(key, None)
        if len(claims) > 1:
            served = _first(claims)
            others = [name for name, one in claims.items() if one is not served]
            if served.type is not ServiceType.LOCAL_REDIRECT and others:
                self.contested[key] = (served.service, *(claims[name].service for name in others))

    def _keys(self) -> Iterable[FrontendKey]:
        return [*self._claims, *(key for key in self._manual if key not in self._claims)]

    def _has(self, key: FrontendKey, address: ServiceAddress) -> bool:
        frontend = self._plain(key)
        return frontend is not None and any(one.address == address for one in frontend.backends)

    def _forget_states(self) -> None:
        for address in list(self._states):
            if not any(self._has(key, address) for key in self._keys()):
                del self._states[address]

    def _change(self, key: FrontendKey, before: Frontend | None) -> Iterator[FrontendChange]:
        now = self._served(key)
        if now is None:
            if before is not None:
                yield Delete(key)
        elif now != before:
            yield Upsert(now)

    def _served(self, key: FrontendKey) -> Frontend | None:
        frontend = self._plain(key)
        return _with_states(frontend, self._states) if frontend is not None and self._states else frontend

    def _plain(self, key: FrontendKey) -> Frontend | None:
        if key in self._manual:
            return self._manual[key]
        claims = self._claims.get(key)
        return _first(claims) if claims is not None else None


def _with_states(frontend: Frontend, states: Mapping[ServiceAddress, BackendState]) -> Frontend:
    """What its source says of a backend that ends goes before what was said by hand."""
    if not any(one.address in states for one in frontend.backends):
        return frontend
    backends = tuple(
        msgspec.structs.replace(one, state=states[one.address], manual=True)
        if one.address in states and one.state is not BackendState.TERMINATING
        else one
        for one in frontend.backends
    )
    return msgspec.structs.replace(frontend, backends=backends)


def _first(claims: Mapping[ServiceName, Frontend]) -> Frontend:
    """The claim that is served: of a service before that of a host port, else the oldest.

    A cluster address goes before what clients outside reach: no other service may take it. What is
    redirected goes before cluster addresses, and after all that clients outside reach.
    """
    if len(claims) == 1:
        return next(iter(claims.values()))
    in_cluster = any(one.type is ServiceType.CLUSTER_IP for one in claims.values())
    ranks = _CLUSTER_RANKS if in_cluster else _OUTSIDE_RANKS
    return min(claims.values(), key=lambda one: ranks.get(one.type, 2))


_CLUSTER_RANKS = {ServiceType.LOCAL_REDIRECT: 0, ServiceType.CLUSTER_IP: 1, ServiceType.HOST_PORT: 4}
_OUTSIDE_RANKS = {ServiceType.LOCAL_REDIRECT: 3, ServiceType.HOST_PORT: 4}
