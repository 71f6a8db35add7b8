"""Values of reward options that are out of bounds, and what is said of them: rows of test_rules.BOUNDS."""

from __future__ import annotations

POSITIVE = "input should be greater than 0"
NOT_NEGATIVE = "input should be greater than or equal to 0"
AT_MOST_1 = "input should be less than or equal to 1"

REWARD_BOUNDS = [
    ("reward_client.max_run_failure_rate", "1.1", "1.1", AT_MOST_1),
    ("reward_client.logged_wait_s", "-1", "-1", NOT_NEGATIVE),
    ("rewards.ocr.role", "silver", "'silver'", "input should be 'train' or 'gold'"),
    ("rewards.ocr.crop", "hole", "'hole'", "input should be 'none' or 'mask_box'"),
    ("rewards.ocr.box_margin", "1.5", "1.5", AT_MOST_1),
    ("rewards.ocr.box_min_side", "0", "0", POSITIVE),
    ("rewards.ocr.transform", "rank", "'rank'", "input should be 'none' or 'win_rate'"),
    ("rewards.ocr.noise", "-0.1", "-0.1", NOT_NEGATIVE),
    ("reward_client.probe_every", "-1", "-1", NOT_NEGATIVE),
    ("reward_client.probe_tolerance", "-1", "-1", NOT_NEGATIVE),
    ("reward_client.on_drift", "pause", "'pause'", "input should be 'warn' or 'stop'"),
    ("evaluation.on_gold_fall", "pause", "'pause'", "input should be 'warn' or 'stop'"),
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
    ("rewards.ocr.engine", "tesseract", "'tesseract'", "input should be 'rapidocr' or 'paddleocr'"),
    ("rewards.vlm.path", "''", "''", "string should have at least 1 character"),
    ("rewards.vlm.mode", "chat", "'chat'", "input should be 'digits' or 'yes'"),
    ("rewards.vlm.min_mass", "1.1", "1.1", AT_MOST_1),
    ("rewards.vlm.dtype", "fp64", "'fp64'", "input should be 'bf16', 'fp16' or 'fp32'"),
    ("rewards.vlm.max_pixels", "0", "0", POSITIVE),
    ("rewards.vlm.images_per_forward", "0", "0", POSITIVE),
    ("rewards.hpsv2.images_per_forward", "0", "0", POSITIVE),
    ("rewards.imagereward.images_per_forward", "0", "0", POSITIVE),
    ("rewards.aesthetic.images_per_forward", "0", "0", POSITIVE),
    ("rewards.mask_composite.judge", "vlm", "'vlm'", "input should be 'clip' or 'hpsv2'"),
    ("rewards.jpeg_size.quality", "96", "96", "input should be less than or equal to 95"),
]
