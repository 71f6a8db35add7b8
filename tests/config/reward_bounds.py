"""Values of reward options that are out of bounds, and what is said of them: rows of test_rules.BOUNDS."""

from __future__ import annotations

POSITIVE = "input should be greater than 0"
NOT_NEGATIVE = "input should be greater than or equal to 0"
AT_MOST_1 = "input should be less than or equal to 1"

REWARD_BOUNDS = [
    ("reward_client.max_run_failure_rate", "1.1", "1.1", AT_MOST_1),
    ("reward_client.balance", "random", "'random'", "input should be 'least_outstanding' or 'round_robin'"),
    ("reward_client.requests_per_server", "0", "0", POSITIVE),
    ("reward_client.hedge_after_s", "0", "0", POSITIVE),
    ("rewards.openai_judge.mode", "chat", "'chat'", "input should be 'logprobs' or 'rubric'"),
    ("rewards.openai_judge.min_mass", "1.1", "1.1", AT_MOST_1),
    ("rewards.openai_judge.concurrency", "0", "0", POSITIVE),
    ("rewards.openai_judge.requests_per_minute", "0", "0", POSITIVE),
    ("rewards.openai_judge.tokens_per_minute", "0", "0", POSITIVE),
    ("rewards.openai_judge.budget_requests", "0", "0", POSITIVE),
    ("rewards.openai_judge.budget_tokens", "0", "0", POSITIVE),
    ("rewards.openai_judge.budget_dollars", "0", "0", POSITIVE),
    ("rewards.openai_judge.price_in", "-1", "-1", NOT_NEGATIVE),
    ("rewards.openai_judge.price_out", "-1", "-1", NOT_NEGATIVE),
    ("rewards.openai_judge.timeout_s", "0", "0", POSITIVE),
    ("rewards.clip.images_per_forward", "0", "0", POSITIVE),
    ("rewards.jpeg_size.quality", "96", "96", "input should be less than or equal to 95"),
    ("rewards.complex_edit.preset", "mean", "'mean'", "input should be 'balanced' or 'brief'"),
    ("rewards.complex_edit.alignment_weight", "1.1", "1.1", AT_MOST_1),
    ("rewards.complex_edit.quality_weight", "-0.1", "-0.1", NOT_NEGATIVE),
    ("rewards.complex_edit.samples", "0", "0", POSITIVE),
    ("rewards.complex_edit.temperature", "-1", "-1", NOT_NEGATIVE),
    ("rewards.mmmg.ged", "exact", "'exact'", "input should be 'closed' or 'networkx'"),
]
