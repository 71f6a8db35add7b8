"""The run, typed. Never imports torch."""

from retouch.config.derived import Derived, derive, numbers
from retouch.config.errors import ConfigError
from retouch.config.load import dump_run, load_run, parse_run
from retouch.config.schema import RunConfig

__all__ = ["ConfigError", "Derived", "RunConfig", "derive", "dump_run", "load_run", "numbers", "parse_run"]
