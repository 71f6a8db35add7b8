"""A step of a solver on the second device: it copies nothing there, and waits for nothing."""

from __future__ import annotations

import json
import sys

from retouch.families import FAMILIES
from tests import forked

OF_DIFFUSERS = dict.fromkeys(("qwen_image", "qwen_image_edit"), ("families/qwen/base.py", "_velocity"))
"""Family -> where its network is called, if diffusers' own forward copies a number to the device."""


def test_no_step_of_any_family_copies_to_the_device_or_waits_for_it() -> None:
    command = [sys.executable, "-m", "tests.rehearsal.steps", *FAMILIES]
    found = json.loads(forked.run(command, check=True).stdout.splitlines()[-1])
    assert found.keys() == FAMILIES.keys()
    for family, places in found.items():
        file, function = OF_DIFFUSERS.get(family, ("", ""))
        own = {p: n for p, n in places.items() if not file or f" {file}:" not in p or f" {function}," not in p}
        # of a rollout: the first noise, and that of all its steps
        assert sum(own.values()) == 2 and not [place for place in own if "in predict" in place], (family, own)
