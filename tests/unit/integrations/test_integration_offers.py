"""Offers of the adapters: one answer for each connection, whatever strangers do with theirs."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

import asyncfabric as af
from asyncfabric.integrations.offers import OfferServer, fetch_offer, parse_place

PATIENCE_S = 20.0


@pytest.fixture
def server() -> Iterator[OfferServer]:
    """Return a server whose offer is larger than what a socket holds."""
    offer = os.urandom(8 << 20)
    made = OfferServer("127.0.0.1", 0, lambda: offer)
    made.offer = offer  # type: ignore[attr-defined]  # for the tests
    yield made
    made.close()
    made.close()


def test_an_offer_is_fetched_whole_also_beside_strangers_that_read_nothing(server: OfferServer) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(8)]
    try:
        assert fetch_offer(f"tcp://127.0.0.1:{server.port}", PATIENCE_S) == server.offer  # type: ignore[attr-defined]
    finally:
        for stranger in strangers:
            stranger.close()


def test_more_strangers_than_it_serves_are_refused_and_it_goes_on(server: OfferServer) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(32)]
    try:
        for stranger in strangers:
            stranger.settimeout(PATIENCE_S)
            assert len(stranger.recv(1)) == 1  # it is served
        with pytest.raises(af.PeerError, match="no offer came from"):
            fetch_offer(f"127.0.0.1:{server.port}", PATIENCE_S)
    finally:
        for stranger in strangers:
            stranger.close()
    for _ in range(1000):  # each of them has to notice
        try:
            assert fetch_offer(f"127.0.0.1:{server.port}", PATIENCE_S) == server.offer  # type: ignore[attr-defined]
            return
        except af.PeerError:
            continue
    pytest.fail("no place became free")


def test_somebody_else_at_the_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(af.PeerError, match="which is no offer of asyncfabric"):
            fetch_offer(place, PATIENCE_S)
        thread.join()


def test_a_port_that_is_taken_and_one_where_nobody_listens_are_named(server: OfferServer) -> None:
    with pytest.raises(af.DeviceError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        OfferServer("127.0.0.1", server.port, bytes)
    port = server.port
    server.close()
    with pytest.raises(af.PeerError, match=f"no offer came from 127.0.0.1:{port} within 20 s"):
        fetch_offer(f"127.0.0.1:{port}", PATIENCE_S)


@pytest.mark.parametrize(
    ("place", "expected"), [("a:1", ("a", 1)), ("tcp://b.c:65535", ("b.c", 65535)), ("[::1]:80", ("::1", 80))]
)
def test_places_are_parsed(place: str, expected: tuple[str, int]) -> None:
    assert parse_place(place) == expected


@pytest.mark.parametrize("place", ["", "a", ":1", "a:", "a:x", "a:65536", "a:-1"])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_place(place)
