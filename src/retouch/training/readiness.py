"""A run begins when its rewards can be scored."""

from __future__ import annotations

from retouch.rewards.addresses import start_servers
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.table import RewardTable
from retouch.rollout.scorer import RewardOutage

STARTING_S = 60.0
"""Servers that are loading get at least so long, whatever `reward_client.outage_wait_s` says of those that ran."""


def wait_for_rewards(table: RewardTable, client: RewardClientConfig) -> None:
    """Until every reward can be scored.

    Raises:
        RewardOutage: it cannot, with what to do where servers that others start are among them.
    """
    problems = table.wait_ready(max(client.outage_wait_s, STARTING_S))
    if not problems:
        return
    started_elsewhere = [n for n, entry in table.entries.items() if entry.url not in (None, "auto") and entry.weight]
    remedy = [start_servers(started_elsewhere)] if started_elsewhere else []
    raise RewardOutage("rewards are not ready: " + "; ".join([*problems, *remedy]))
