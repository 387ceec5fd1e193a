"""Assigns each instance to one tool host, so that the instance's jails stay warm. Pure.

An instance stays with its host while the broker knows both. The broker knows a host by its address, which the host
keeps over a reconnect and a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from goondan.kernel.broker.entities import Connection, Instance


class Assignments:
    """Instances by the address of their tool host. The same host stands in `Instance.host`."""

    def __init__(self) -> None:
        self._served: dict[str, dict[Instance, None]] = {}
        #: Names of agents whose instances of one key are served by one host, because they share an MCP server.
        self.together: frozenset[str] = frozenset()
        #: Instances of these agents that have a host, by their key.
        self._by_key: dict[str, dict[Instance, None]] = {}

    def assign(self, instance: Instance, host: Connection) -> None:
        """This host serves the instance from now on."""
        self.release(instance)
        instance.host = host
        self._served.setdefault(host.address, {})[instance] = None
        if instance.agent in self.together:
            self._by_key.setdefault(instance.key, {})[instance] = None

    def release(self, instance: Instance) -> None:
        """No host serves the instance any more."""
        if instance.host is None:
            return
        served = self._served[instance.host.address]
        del served[instance]
        if not served:
            del self._served[instance.host.address]
        instance.host = None
        others = self._by_key.get(instance.key)
        if others is not None:
            others.pop(instance, None)
            if not others:
                del self._by_key[instance.key]

    def host_for(self, instance: Instance, hosts: Iterable[Connection]) -> Connection | None:
        """The tool host of an instance. It is the same one while it lives, so that the instance's jails stay warm. None
        where there is no host.
        """
        if instance.host is None:
            others = self._by_key.get(instance.key, ()) if instance.agent in self.together else ()
            host = next((other.host for other in others if other.host is not None), None) or self.lightest(hosts)
            if host is not None:
                self.assign(instance, host)
        return instance.host

    def release_all(self, address: str, of: Callable[[Connection], bool] = lambda host: True) -> None:
        """The host at this address serves nobody any more. With `of`, only connections for which it is true count."""
        for instance in list(self._served.get(address, ())):
            if instance.host is not None and of(instance.host):
                self.release(instance)

    def served(self, address: str) -> int:
        """How many instances the host at this address serves."""
        return len(self._served.get(address, ()))

    def lightest(self, hosts: Iterable[Connection]) -> Connection | None:
        """The host that serves the fewest instances; None where there is none."""
        return min(hosts, key=lambda host: (self.served(host.address), host.address), default=None)
