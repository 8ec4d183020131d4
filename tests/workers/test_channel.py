"""The frames between a process and its workers: several at once, torn ones, and the end of the
other side."""

from __future__ import annotations

import socket

import pytest

from shoal.workers.process import Channel, frame


@pytest.fixture
def ends():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield Channel(mine), theirs


def test_frames_that_arrive_together_are_all_received_in_order(ends):
    channel, other = ends
    other.sendall(frame({"job": 1}, b"first") + frame({"job": 2}) + frame({"job": 3}, b"third"))
    assert channel.receive(1.0) == [
        ({"job": 1}, b"first"),
        ({"job": 2}, b""),
        ({"job": 3}, b"third"),
    ]


def test_a_torn_frame_waits_for_its_rest(ends):
    channel, other = ends
    whole, torn = frame({"job": 1}, b"x" * 100), frame({"job": 2}, b"y" * 100)
    other.sendall(whole + torn[:40])
    assert channel.receive(1.0) == [({"job": 1}, b"x" * 100)]
    assert channel.receive(0.05) == []
    other.sendall(torn[40:])
    assert channel.receive(1.0) == [({"job": 2}, b"y" * 100)]


def test_what_was_sent_before_the_end_is_received_before_the_error(ends):
    channel, other = ends
    other.sendall(frame({"job": 1}))
    other.close()
    assert channel.receive(1.0) == [({"job": 1}, b"")]
    with pytest.raises(EOFError):
        channel.receive(1.0)
