"""From `retouch eval --benchmark NAME|FILE.yaml --path PATH` to a benchmark. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retouch.benchmarks import BENCHMARKS
from retouch.benchmarks.base import Benchmark
from retouch.config.errors import explain, nearest
from retouch.config.load import read_yaml
from retouch.config.published import is_run_file, resolved
from retouch.config.variables import with_variables
from retouch.errors import ConfigError
from retouch.files.disk import is_file
from retouch.registry import import_plugins_of_environment


def load_benchmark(given: str, path: Path | None) -> Benchmark:
    """The benchmark of a name, or of a YAML file with the keys of `Benchmark`.

    Args:
        path: replaces the file's `path`.

    Raises:
        ConfigError: no such name or file, an unknown key, or a value that is not valid.
    """
    keys: dict[str, Any] = {"name": given}
    source = "--benchmark"
    if is_run_file(given):
        if not is_file(file := resolved(given)):
            raise ConfigError(f"--benchmark: given {given}; no such file")
        keys, source = read_yaml(file), given
    if path is not None:
        keys["path"] = str(path)
    import_plugins_of_environment()
    name = keys.get("name")
    if not isinstance(name, str) or name not in BENCHMARKS:
        where = "--benchmark" if source == "--benchmark" else f"{source}: name"
        raise ConfigError(f"{where}: given {name!r}; {nearest(str(name), BENCHMARKS)}")
    if "path" not in keys:
        raise ConfigError(f"--path: not set; give the data of {name} ({BENCHMARKS[name].source})")
    kind = BENCHMARKS[name]
    rewards = keys.pop("rewards", {})  # their variables are filled in with the benchmark's own rewards
    try:
        benchmark = kind.model_validate({**with_variables(keys), "rewards": rewards})
        benchmark.data()  # its format checks the keys that choose a part of the data
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in explain(error, kind))) from None
    return benchmark.with_path_key(
        "--path" if path is not None or source == "--benchmark" else f"--benchmark {source}: path"
    )
