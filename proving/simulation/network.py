"""An in-memory network: `environment.Network` between named hosts, with all that goes wrong.

It is TCP as its users see it. Bytes on a cut link are held. The connection survives when the link
is healed in time; otherwise both ends give up, each by itself, with ETIMEDOUT. A dead process's
connections end or are reset. A host without power sends nothing at all.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Iterable

from proving.simulation.link import CHUNKING, LATE_SHARE, LATE_TIMES, Link, NetworkHost
from proving.simulation.loop import SimulationLoop
from proving.simulation.owner import Owner
from proving.simulation.streams import SimulatedTransport, Stream
from rayq.environment import Accept

SAME_HOST_S = (0.00001, 0.0001)
OTHER_HOST_S = (0.0001, 0.002)
"""The delays one way in a good network, at least and usually at most; one in 200 takes up to 20
times as long."""

GIVE_UP_S = (8.0, 14.0)
"""The kernel ends a connection after this time without a working link (keepalive, user timeout)."""

CONNECT_TIMEOUT_S = (4.0, 10.0)
"""A connect fails after this time without an answer."""

SYN_RETRY_S = 1.0
"""A connect that gets no answer tries again after this time."""

FIRST_FREE_PORT = 40_000


class SimulatedListener:
    """`environment.Listener`."""

    def __init__(
        self,
        network: SimulatedNetwork,
        place: NetworkHost,
        owner: Owner,
        host: str,
        port: int,
        accept: Accept,
    ) -> None:
        self.host = host
        self.port = port
        self.place = place
        self.owner = owner
        self.accept = accept
        self.context = owner.copy_context()
        self._network = network

    def close(self) -> None:
        self.owner.check_alive()
        self._network.remove_listener(self)


class SimulatedNetwork:
    """The network of all hosts. Processes use a `ProcessNetwork`."""

    def __init__(self, loop: SimulationLoop, rng: random.Random) -> None:
        self.loop = loop
        self.delay_s = OTHER_HOST_S
        """The delays of the links between hosts that are not slow."""
        self._rng = rng
        self._hosts: dict[str, NetworkHost] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._knobs: dict[str, float] = {}
        """Changes of `disturb`, for links to come."""
        self._listeners: dict[tuple[str, int], SimulatedListener] = {}
        self._transports: dict[SimulatedTransport, NetworkHost] = {}
        self._ports: dict[str, int] = {}
        self.on_lost: Callable[[Owner], None] | None = None
        """Called with both owners of a connection as soon as one of them loses it."""

    def add_host(self, host: NetworkHost) -> None:
        self._hosts[host.name] = host

    # --- for the test -----------------------------------------------------------------------------

    def link(self, source: NetworkHost, target: NetworkHost) -> Link:
        """The one-way link; its delays, rate and chunking may be set."""
        key = source.name, target.name
        if key not in self._links:
            delay_s = SAME_HOST_S if source is target else self.delay_s
            self._links[key] = link = Link(source, target, delay_s, self.loop, self._rng)
            vars(link).update(self._knobs)
        return self._links[key]

    def disturb(self, **knobs: float) -> None:
        """Sets knobs of all links, also of those to come; without any, ends all of that."""
        calm = {
            "chunking": CHUNKING,
            "late_share": LATE_SHARE,
            "late_times": LATE_TIMES,
            "break_share": 0.0,
        }
        assert knobs.keys() <= calm.keys(), knobs
        self._knobs = {**self._knobs, **knobs} if knobs else calm
        for link in self._links.values():
            vars(link).update(self._knobs)

    def cut(
        self,
        sources: Iterable[NetworkHost],
        targets: Iterable[NetworkHost],
        *,
        both_ways: bool = True,
    ) -> None:
        """Cuts every link from one of `sources` to another host in `targets`."""
        links = self._between(sources, targets, both_ways)
        for link in links:
            link.cut = True
        self._note("cut", links)
        self._lost_touch()

    def heal(
        self,
        sources: Iterable[NetworkHost] | None = None,
        targets: Iterable[NetworkHost] | None = None,
    ) -> None:
        """Ends cuts and slowness both ways between these hosts (None: all)."""
        everyone = list(self._hosts.values())
        links = self._between(
            everyone if sources is None else sources, everyone if targets is None else targets, True
        )
        for link in links:
            link.cut = False
            link.delay_s, link.bytes_per_s = self.delay_s, None
        self._note("healed", links)
        self.links_are_back()

    def slow(
        self,
        sources: Iterable[NetworkHost],
        targets: Iterable[NetworkHost],
        *,
        delay_s: tuple[float, float],
        bytes_per_s: float | None = None,
    ) -> None:
        """Makes the links both ways slow."""
        links = self._between(sources, targets, True)
        for link in links:
            link.delay_s, link.bytes_per_s = delay_s, bytes_per_s
        self._note("slow", links)

    def reset(self, sources: Iterable[NetworkHost], targets: Iterable[NetworkHost]) -> int:
        """Resets all connections between these hosts, and within a host that is in both. Returns
        the number of connections."""
        ends = {host.name for host in sources}, {host.name for host in targets}
        count = 0
        for transport, host in list(self._transports.items()):
            peer = transport.out.link.target
            if host.name in ends[0] and peer.name in ends[1] and not transport.gone:
                transport.reset()
                count += 1
        self.loop.trace.note(f"{count} connections reset")
        return count

    # --- for hosts and processes ------------------------------------------------------------------

    def process_died(self, owner: Owner, *, power_loss: bool) -> None:
        """Closes the sockets of the process. After a power loss its peers are not told."""
        for listener in list(self._listeners.values()):
            if listener.owner is owner:
                self.remove_listener(listener)
        for transport in self._of(owner):
            if power_loss:
                transport.vanish()
            else:
                transport.process_died()

    def host_went_down(self) -> None:
        self._lost_touch()

    def links_are_back(self) -> None:
        """Sends lost bytes again on links that work now."""
        for transport in self._transports:
            transport.out.link_is_back()

    def remove_listener(self, listener: SimulatedListener) -> None:
        self._listeners.pop((listener.place.name, listener.port), None)

    async def connect(
        self,
        place: NetworkHost,
        owner: Owner,
        host: str,
        port: int,
        factory: Callable[[], asyncio.BaseProtocol],
    ) -> asyncio.BaseProtocol:
        target = self._resolve(place, host)
        there, back = self.link(place, target), self.link(target, place)
        deadline = self.loop.time() + self._rng.uniform(*CONNECT_TIMEOUT_S)
        arrival = there.arrival(0)
        while True:
            await asyncio.sleep(arrival - self.loop.time())
            if not there.is_cut() and not back.is_cut():
                break
            if self.loop.time() >= deadline:
                self.loop.trace.note(f"{owner.name}: connect to {host}:{port} timed out")
                raise TimeoutError(errno.ETIMEDOUT, f"Connect call failed ({host!r}, {port})")
            arrival = min(deadline, self.loop.time() + SYN_RETRY_S)
        listener = self._listeners.get((target.name, port))
        if listener is None:
            await asyncio.sleep(back.arrival(0) - self.loop.time())
            raise ConnectionRefusedError(
                errno.ECONNREFUSED, f"Connect call failed ({host!r}, {port})"
            )
        transport = self._establish(owner, listener, there, back)
        try:
            await asyncio.sleep(back.arrival(0) - self.loop.time())
            if transport.gone:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            protocol = factory()
            transport.connect(protocol)
        except BaseException:
            transport.process_died()
            raise
        return protocol

    def listen(
        self,
        place: NetworkHost,
        owner: Owner,
        host: str,
        port: int,
        accept: Accept,
    ) -> SimulatedListener:
        if self._resolve(place, host) is not place:
            raise OSError(errno.EADDRNOTAVAIL, f"{host} is not an address of {place.name}")
        port = port or self._free_port(place)
        if (place.name, port) in self._listeners:
            raise OSError(errno.EADDRINUSE, f"Port {port} of {place.name} is taken")
        listener = SimulatedListener(self, place, owner, host, port, accept)
        self._listeners[place.name, port] = listener
        return listener

    # --- inside -----------------------------------------------------------------------------------

    def _establish(
        self, owner: Owner, listener: SimulatedListener, there: Link, back: Link
    ) -> SimulatedTransport:
        client_name = there.source.address, self._free_port(there.source)
        server_name = there.target.address, listener.port
        client = SimulatedTransport(
            self.loop,
            self._rng,
            owner,
            owner.copy_context(),
            {"sockname": client_name, "peername": server_name},
        )
        server = SimulatedTransport(
            self.loop,
            self._rng,
            listener.owner,
            listener.context.copy(),
            {"sockname": server_name, "peername": client_name},
        )
        client.out = server.into = Stream(client, server, there, back)
        server.out = client.into = Stream(server, client, back, there)
        client.on_lost = server.on_lost = self._lost
        self._transports = {
            transport: place
            for transport, place in self._transports.items()
            if not (transport.gone and transport.out.receiver.gone)
        }
        self._transports[client] = there.source
        self._transports[server] = there.target
        self.loop.call_soon(self._accept, server, listener, context=listener.context.copy())
        self.loop.trace.note(f"{owner.name} connects to {listener.owner.name}:{listener.port}")
        return client

    def _accept(self, transport: SimulatedTransport, listener: SimulatedListener) -> None:
        if transport.gone:
            return
        host, _ = transport.get_extra_info("peername")
        protocol = listener.accept(host, transport.abort)
        if protocol is None:
            transport.abort()
        else:
            transport.connect(protocol)

    def _resolve(self, place: NetworkHost, host: str) -> NetworkHost:
        if host in ("127.0.0.1", "localhost", "0.0.0.0"):
            return place
        for known in self._hosts.values():
            if host in (known.address, known.name):
                return known
        raise OSError(errno.ENOENT, f"Name or service not known: {host!r}")

    def _free_port(self, place: NetworkHost) -> int:
        port = self._ports.get(place.name, FIRST_FREE_PORT)
        self._ports[place.name] = port + 1
        return port

    def _between(
        self, sources: Iterable[NetworkHost], targets: Iterable[NetworkHost], both_ways: bool
    ) -> list[Link]:
        targets = list(targets)
        links = []
        for source in sources:
            for target in targets:
                if source is not target:
                    links.append(self.link(source, target))
                    if both_ways:
                        links.append(self.link(target, source))
        return links

    def _note(self, what: str, links: list[Link]) -> None:
        names = ", ".join(f"{link.source.name}>{link.target.name}" for link in links)
        self.loop.trace.note(f"{what}: {names}")

    def _lost(self, transport: SimulatedTransport) -> None:
        if self.on_lost is not None:
            self.on_lost(transport.owner)
            self.on_lost(transport.out.receiver.owner)

    def _lost_touch(self) -> None:
        """Sets the time at which both ends give up for each connection that has no working link."""
        for transport in self._live():
            if _is_cut(transport):
                self.loop.call_later(
                    self._rng.uniform(*GIVE_UP_S),
                    self._give_up,
                    transport,
                    context=self.loop.root.context,
                )

    def _give_up(self, transport: SimulatedTransport) -> None:
        if not transport.gone and (_is_cut(transport) or transport.out.receiver.gone):
            transport.give_up()

    def _live(self) -> list[SimulatedTransport]:
        return [transport for transport in self._transports if not transport.gone]

    def _of(self, owner: Owner) -> list[SimulatedTransport]:
        return [transport for transport in self._live() if transport.owner is owner]


def _is_cut(transport: SimulatedTransport) -> bool:
    return transport.out.link.is_cut() or transport.into.link.is_cut()


class ProcessNetwork:
    """`environment.Network` for one process."""

    def __init__(self, network: SimulatedNetwork, host: NetworkHost, owner: Owner) -> None:
        self._network = network
        self._host = host
        self._owner = owner

    async def connect(
        self, host: str, port: int, protocol_factory: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.BaseProtocol:
        self._owner.check_alive()
        return await self._network.connect(self._host, self._owner, host, port, protocol_factory)

    async def listen(self, host: str, port: int, accept: Accept) -> SimulatedListener:
        self._owner.check_alive()
        return self._network.listen(self._host, self._owner, host, port, accept)
