"""A server that is broken and fast, beside a sound one: it gets no traffic, and every item its score."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from retouch.rewards.client.client import RewardClient
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.client.servers import BREAKER_FAILURES
from retouch.types import Failure
from tests.rewards.fakes import HANG_S, until
from tests.selection import rows

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import broken_servers as kit

WAYS: dict[str, Any] = {**kit.WAYS, **kit.MORE_WAYS}
REWARDS = ["other", kit.REWARD]
SLOW = {"hangs after headers", "trickles"}
BALANCES = ("least_outstanding", "round_robin")
LIKE_500 = {
    "401",
    "404",
    "HTML",
    "raises",
    "redirects",
    "out of range",
    "500",
    "cut off",
    "NaN",
    "truncated",
}
"""Replies that tests of the client alone take, too: beside a sound server, in `make test-all`."""
PASSING = {"500", "cut off"}
"""Ways that one server is asked again for, until time is up."""


def client_of(*urls: str, rewards: list[str] = REWARDS, **options: Any) -> RewardClient:
    return RewardClient(urls, rewards, options=RewardClientConfig(**{"timeout_s": 10.0, "batch_size": 4, **options}))


@pytest.mark.parametrize(
    ("way", "balance"),
    rows([*product(WAYS, BALANCES)], [(way, BALANCES[n % 2]) for n, way in enumerate(WAYS) if way not in LIKE_500]),
)
def test_a_broken_server_takes_no_traffic_from_a_sound_one(way: str, balance: str) -> None:
    """160 items: of the fast broken server, as of one that is away, only what opens its breaker is asked."""
    rewards = [kit.REWARD] if way == "other names" else REWARDS
    timeout = 5.0 if way in SLOW else 30.0
    with (
        kit.Stub(kit.sound, 0.0005) as good,
        kit.broken(WAYS[way]) as (url, reached),
        client_of(url, good.url, rewards=rewards, balance=balance, timeout_s=timeout) as client,
    ):
        batch = kit.items(160)
        found = client.score(batch)
        bad, sound = client._balancer.servers
        assert [kit.right(batch, found[name]) for name in rewards] == [160] * len(rewards)
        assert sound.failures == 0 and (not bad.sound or way in SLOW)
        assert client.statistics.attempts <= 1.2 * client.statistics.requests + 5
        assert reached() <= BREAKER_FAILURES + 2 * client.options.requests_per_server


@pytest.mark.parametrize("way", [way for way in WAYS if way not in SLOW and WAYS[way] is not None])
def test_with_one_server_nothing_changes(way: str) -> None:
    """It is asked once for what it would reply again, and no breaker opens."""
    with (
        kit.broken(WAYS[way]) as (url, reached),
        client_of(url, timeout_s=1.0 if way in PASSING else 30.0, batch_size=1) as client,
    ):
        found = client.score(kit.items(8))[kit.REWARD]
        (server,) = client._balancer.servers
    codes = {outcome.code for outcome in found if isinstance(outcome, Failure)}
    assert len(found) == 8 and codes and codes <= {"scorer_error", "bad_reply", "refused", "worker_lost", "unavailable"}
    if way not in PASSING:
        assert reached() == 8 and server.failures == 0


def raises_for_poison(one: Any) -> None:
    poisoned = any(item["prompt"] == "poison" for item in one.manifest["items"])
    (kit.raises if poisoned else kit.sound)(one)


def test_a_request_that_no_server_answers_condemns_nobody() -> None:
    """An image at which every scorer raises: it fails alone, and two servers are asked for a share of such images."""
    poison = [replace(one, prompt="poison") for one in kit.items(80)]
    with (
        kit.Stub(raises_for_poison) as first,
        kit.Stub(raises_for_poison) as second,
        client_of(first.url, second.url, batch_size=1) as client,
    ):
        assert {o.code for o in client.score(poison)[kit.REWARD] if isinstance(o, Failure)} == {"scorer_error"}
        assert [server.failures for server in client._balancer.servers] == [0, 0]
        assert 80 < client.statistics.attempts <= 1.2 * 80 + 15
        batch = kit.items(40)
        assert kit.right(batch, client.score(batch)[kit.REWARD]) == 40


def test_a_reply_with_more_scores_is_kept_where_none_is_whole() -> None:
    """One server has one of two rewards, the other none, or it is away: the scores there are may have a price."""
    with kit.Stub(kit.one_of_two_raises) as half, kit.Stub(kit.raises) as none, kit.broken(None) as (away, _):
        for urls in ((half.url, none.url), (none.url, half.url), (half.url, away), (away, half.url)):
            with client_of(*urls) as client:
                batch = kit.items(4)
                found = client.score(batch)
                assert kit.right(batch, found["other"]) == 4 and not kit.right(batch, found[kit.REWARD])


def test_another_server_is_asked_for_the_rewards_without_an_answer_alone() -> None:
    """A judge that has answered is not asked, and paid, again because a reward beside it failed; of a server that
    breaks the protocol for one reward nothing is kept."""
    for broken, again in ((kit.one_of_two_raises, [kit.REWARD]), (kit.out_of_range, REWARDS)):
        asked: list[list[str]] = []

        def noted(one: Any, asked: list[list[str]] = asked) -> None:
            asked.append(one.manifest["rewards"])
            kit.sound(one)

        with kit.Stub(broken) as half, kit.Stub(noted) as whole, client_of(half.url, whole.url) as client:
            batch = kit.items(4)
            found = client.score(batch)
            assert [kit.right(batch, found[name]) for name in REWARDS] == [4, 4] and list(found) == REWARDS
        assert (half.requests, asked) == (1, [again])


def test_two_servers_that_answer_one_reward_each_answer_both() -> None:
    def other_raises(one: Any) -> None:
        if one.manifest["rewards"] == [kit.REWARD]:
            kit.sound(one)
        else:
            kit.raises(one)

    with kit.Stub(kit.one_of_two_raises) as a, kit.Stub(other_raises) as b, client_of(a.url, b.url) as client:
        batch = kit.items(4)
        assert [kit.right(batch, client.score(batch)[name]) for name in REWARDS] == [4, 4]


def test_two_broken_servers_of_three() -> None:
    with (
        kit.Stub(kit.html) as a,
        kit.Stub(kit.raises) as b,
        kit.Stub(kit.sound, 0.0005) as good,
        client_of(a.url, b.url, good.url) as client,
    ):
        batch = kit.items(160)
        assert kit.right(batch, client.score(batch)[kit.REWARD]) == 160
        assert [server.sound for server in client._balancer.servers] == [False, False, True]


def test_a_server_whose_breaker_half_opens_holds_no_request_up() -> None:
    """It is tried beside a sound one, and gets requests again once it answers."""
    with (
        kit.Stub(kit.hangs_after_headers) as bad,
        kit.Stub(kit.sound) as good,
        client_of(bad.url, good.url, timeout_s=60.0) as client,
    ):
        place = client._balancer.servers[0]
        place.failures = BREAKER_FAILURES
        started = time.monotonic()
        for _ in range(10):
            batch = kit.items(8)
            assert kit.right(batch, client.score(batch)[kit.REWARD]) == 8
        assert time.monotonic() - started < HANG_S and bad.requests == 1  # a request that is held up takes 60 s
        bad.way = kit.sound
        bad.closing.set()  # the request that hangs ends in the middle of its reply
        until(lambda: place.under_way == 0)
        place.open_until = 0.0
        until(lambda: bool(client.score(kit.items(8))) and place.sound)  # the faster one then gets the requests
        assert bad.requests > 1
