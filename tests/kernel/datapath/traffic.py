"""Sends numbered datagrams at a steady rate between two ends of a live node, to detect losses."""

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from hive.lab.traffic.flows import udp_socket
from tests.kernel.datapath.node import ROUTER, LivePod
from tests.support.namespaces import inside

Flow = tuple[list[int], set[int]]
"""Numbers sent, numbers received."""


def lost(traffic: Flow) -> set[int]:
    """Return the numbers that were sent since the first arrival and did not arrive."""
    sent, received = traffic
    return set(range(min(received), len(sent))) - received


@contextmanager
def flow(source: LivePod | None, target: LivePod | None, *, answer: bool = False) -> Iterator[Flow]:
    """Send 1000 numbered datagrams a second from one end to the other; None is the node itself.

    With ``answer`` they follow one request, so they pass only while its conntrack entry lives.
    """
    with inside(target.net) if target else nullcontext():
        receiver = udp_socket()
    with inside(source.net) if source else nullcontext():
        sender = udp_socket()
    there = str(target.ip if target else ROUTER), receiver.getsockname()[1]
    receiver.settimeout(1)
    if answer:
        receiver.sendto(b"?", (str(source.ip if source else ROUTER), sender.getsockname()[1]))
        sender.settimeout(30)  # it may have to wait for a second question for the gateway
        sender.recv(1)
    sent: list[int] = []
    received: set[int] = set()
    done, all_sent = threading.Event(), threading.Event()

    def send() -> None:
        due = time.monotonic()
        while not done.is_set():
            sender.sendto(struct.pack("<I", len(sent)), there)
            sent.append(len(sent))
            due += 0.001
            done.wait(max(0.0, due - time.monotonic()))

    def receive() -> None:
        while not all_sent.is_set() or len(sent) - 1 not in received:
            try:
                received.add(struct.unpack("<I", receiver.recv(4))[0])
            except TimeoutError:  # before all is sent, the sender was not let run
                if all_sent.is_set():
                    return

    sending, receiving = threading.Thread(target=send), threading.Thread(target=receive)
    for thread in (sending, receiving):
        thread.start()
    try:
        yield sent, received
    finally:
        done.set()
        sending.join()
        all_sent.set()
        receiving.join()
        receiver.close()
        sender.close()
