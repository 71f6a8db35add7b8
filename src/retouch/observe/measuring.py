"""Measurements that a run can do without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from retouch.errors import first_line

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Measurement:
    """A measurement that never ends a run: its first exception is a warning, and it is not taken again.

    Every metric that asks a device, or runs code of a library on what a plug-in gives it, is taken through one: a
    driver, an allocator or a network that nobody foresaw must cost a number, not the run.

    Args:
        name: beginning of the warning, like "metrics tflops and mfu".

    Attributes:
        works: false after an exception.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.works = True

    def take(self, measure: Callable[..., T], *args: object) -> T | None:
        """The result of `measure(*args)`; None where it raised, now or before."""
        if not self.works:
            return None
        try:
            return measure(*args)
        except Exception as error:
            self.works = False
            logger.warning("%s: not measured from here on (%s: %s)", self.name, type(error).__name__, first_line(error))
            return None
