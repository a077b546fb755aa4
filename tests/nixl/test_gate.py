"""Who is let in, in which order it is judged, and that the table of addresses stays small."""

from __future__ import annotations

import ipaddress

import pytest

from kvconn.config import network
from kvconn.nixl.gate import ADMITTED, BURST, BUSY, REFUSED, Gate, RateLimit
from kvconn.trust import Address, Trust

KEY = b"k" * 32


def at(text: str) -> Address:
    return ipaddress.ip_address(text)


class TestRateLimit:
    def test_a_burst_then_the_rate(self) -> None:
        limit = RateLimit(2.0)
        burst = int(2 * BURST)
        assert [limit.take(at("10.0.0.1"), 0.0) for _ in range(burst + 2)] == [True] * burst + [False] * 2
        assert [limit.take(at("10.0.0.1"), 1.0) for _ in range(3)] == [True, True, False]
        assert sum(limit.take(at("10.0.0.1"), 1e6) for _ in range(100)) == burst  # never more than that

    def test_addresses_do_not_pay_for_each_other_but_a_64_is_one(self) -> None:
        limit = RateLimit(1.0)
        for _ in range(int(BURST)):
            assert limit.take(at("10.0.0.1"), 0.0) and limit.take(at("fd00::1"), 0.0)
        assert not limit.take(at("10.0.0.1"), 0.0) and limit.take(at("10.0.0.2"), 0.0)
        assert not limit.take(at("fd00::2"), 0.0) and limit.take(at("fd00:0:0:1::1"), 0.0)

    def test_a_clock_that_steps_back_gives_nothing(self) -> None:
        limit = RateLimit(1.0)
        for _ in range(int(BURST)):
            limit.take(at("10.0.0.1"), 100.0)
        assert not limit.take(at("10.0.0.1"), 0.0)

    def test_the_table_is_bounded_and_the_quiet_ones_leave(self) -> None:
        limit = RateLimit(1.0, size=8)
        busy = at("10.0.0.1")
        for i in range(1000):
            limit.take(busy, 0.0)
            limit.take(at(f"11.0.{i // 250}.{i % 250}"), 0.0)
        assert len(limit) == 8
        assert not limit.take(busy, 0.0)  # still known


class TestGate:
    def test_the_address_is_judged_first(self) -> None:
        gate = Gate(Trust(allow=(network("10.0.0.0/8"),), rate=1.0), [KEY])
        for _ in range(int(BURST) * 2):  # also when it has the key, and however often
            code, why = gate.connects("11.0.0.1", b"CURVE", [KEY], 0.0)
            assert code == REFUSED and "11.0.0.1 is not in kvconn.allow" in why
        assert gate.connects("10.0.0.1", b"CURVE", [KEY], 0.0) == (ADMITTED, "")

    @pytest.mark.parametrize(
        ("mechanism", "credentials"),
        [(b"NULL", []), (b"CURVE", []), (b"CURVE", [b"x" * 32]), (b"CURVE", [b""]), (b"PLAIN", [KEY])],
    )
    def test_only_the_fleets_key_opens(self, mechanism: bytes, credentials: list[bytes]) -> None:
        code, why = Gate(Trust(), [KEY]).connects("10.0.0.1", mechanism, credentials, 0.0)
        assert code == REFUSED and "another key" in why

    def test_without_a_key_anybody_comes_in(self) -> None:
        assert Gate(Trust()).connects("203.0.113.1", b"NULL", [], 0.0)[0] == ADMITTED

    def test_who_comes_too_often_is_told_to_come_later(self) -> None:
        gate = Gate(Trust(rate=1.0))
        codes = [gate.connects("10.0.0.1", b"NULL", [], 0.0)[0] for _ in range(int(BURST) + 1)]
        assert codes == [ADMITTED] * int(BURST) + [BUSY]
        assert gate.connects("10.0.0.2", b"NULL", [], 0.0)[0] == ADMITTED

    def test_requests_have_a_budget_of_their_own(self) -> None:
        gate = Gate(Trust(rate=1.0))
        assert [gate.asks("10.0.0.1", 0.0) for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]
        assert not gate.asks("no address", 0.0)
        assert gate.connects("10.0.0.1", b"NULL", [], 0.0)[0] == ADMITTED


class TestZap:
    def test_a_question_is_answered_with_its_own_id(self) -> None:
        asked = [b"sender", b"", b"1.0", b"7", b"kvconn", b"10.0.0.1", b"", b"CURVE", KEY]
        reply, why = Gate(Trust(), [KEY]).zap(asked, 0.0)
        assert (reply, why) == ([b"sender", b"", b"1.0", b"7", b"200", b"", b"", b""], "")

    @pytest.mark.parametrize("address", [b"", b"host", b"\xff\xfe", b"10.0.0.1:5"])
    def test_what_is_no_address_is_refused(self, address: bytes) -> None:
        reply, _ = Gate(Trust()).zap([b"s", b"", b"1.0", b"7", b"", address, b"", b"NULL"], 0.0)
        assert reply[4] == REFUSED

    @pytest.mark.parametrize("rest", [[], [b""], [b"d", b"10.0.0.1", b""]])
    def test_a_question_that_cannot_be_read_is_answered_with_a_refusal(self, rest: list[bytes]) -> None:
        reply, why = Gate(Trust()).zap([b"s", b"", b"1.0", b"7", *rest], 0.0)
        assert reply[3:5] == [b"7", REFUSED] and why

    @pytest.mark.parametrize("frames", [[], [b"s"], [b"s", b"", b"1.0"], [b"s", b"x", b"1.0", b"7"]])
    def test_what_is_no_question_gets_no_answer(self, frames: list[bytes]) -> None:
        assert Gate(Trust()).zap(frames, 0.0)[0] == []
