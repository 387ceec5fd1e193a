"""Who listens on which port, from tables as Linux writes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from goondan.features.model_servers.api.listing import Listener, listeners, owned

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(address: str, port: int, uid: int, state: str = "0A") -> str:
    return f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid:5d} 0 1 1\n"


ANY, LOOP, OTHER, LAN = "00000000", "0100007F", "0200007F", "0101A8C0"
ANY_6, LOOP_6 = "0" * 32, "00000000000000000000000001000000"
MAPPED, LAN_6 = "0000000000000000FFFF00000100007F", "000080FE00000000FF00000001000000"


def test_listeners_that_a_connection_within_the_machine_reaches() -> None:
    four = HEAD + line(ANY, 1, 0) + line(LOOP, 2, 7) + line(OTHER, 3, 7) + line(LAN, 4, 7) + line(LOOP, 5, 7, "01")
    six = HEAD + line(ANY_6, 6, 8) + line(LOOP_6, 7, 8) + line(MAPPED, 8, 8) + line(LAN_6, 9, 8)
    assert listeners(four, six) == [
        Listener(1, 0, True), Listener(2, 7, True), Listener(3, 7, True),
        Listener(6, 8, True), Listener(7, 8, False), Listener(8, 8, True),
    ]  # fmt: skip


def test_a_port_is_somebodys_only_if_all_its_listeners_are() -> None:
    """The more specific address gets the connection, and 127.0.0.1 can be another user's where 0.0.0.0 is root's."""
    found = [Listener(80, 0, True), Listener(80, 7, True), Listener(81, 7, False), Listener(82, 0, True)]
    assert owned(found, (0, 7)) == {80: "127.0.0.1", 81: "[::1]", 82: "127.0.0.1"}
    assert owned(found, (0, 8)) == {82: "127.0.0.1"}


@given(st.text(max_size=400))
def test_any_table_is_read(text: str) -> None:
    listeners(text, HEAD + text)
