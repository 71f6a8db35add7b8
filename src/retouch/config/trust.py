"""Consent to the code and the hosts that the run file of a run directory names.

A run file is the user's own, and `train` itself takes its run file as that, wherever it lies. A run directory may come
from anybody and is data: any other command uses the code and the hosts that it names only with consent. Consent is
`--trust`, a value that the command line or the environment names as well, or that `retouch train` wrote this run file
to this directory. `train` records that in the user's state folder, by the real path of the directory and the content of
its run file: a copy has no consent, and neither has a changed file.

Options declare what they name by `Names`. A server on this machine's loopback needs no consent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from retouch.config.base import Names, Section
from retouch.errors import ConfigError, shown
from retouch.files.disk import state_folder
from retouch.rewards.addresses import base_url, is_local

logger = logging.getLogger(__name__)

_MOST = 20
"""Values in a message."""

Key = tuple[str, ...]
"""Keys from the top of a run file to an option; one may contain a dot."""


def named(value: object, key: Key = ()) -> dict[Key, list[str]]:
    """The values of a validated run file that name code or a host which needs consent, by their keys."""
    found: dict[Key, list[str]] = {}
    if isinstance(value, BaseModel):
        unused = value.unused() if isinstance(value, Section) else frozenset[str]()
        for name, info in type(value).model_fields.items():
            marks = [mark for mark in info.metadata if isinstance(mark, Names)]
            given = getattr(value, name)
            # An option with marks is judged whole; of any other one the parts are, because sections and lists nest.
            # Options that the kind of a section does not use are left out: nothing imports or calls what they name.
            if not marks:
                found |= named(given, (*key, name))
            elif name not in unused and (others := foreign(given, marks[0])):
                found[*key, name] = others
    elif isinstance(value, Mapping):
        for name, part in cast("Mapping[object, object]", value).items():
            found |= named(part, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(cast("list[object]", value)):
            found |= named(part, (*key, str(number)))
    return found


def foreign(value: object, mark: Names) -> list[str]:
    """The texts in the value of an option that name code or a host which needs consent: not the package's own, not on
    this machine, and not named in the environment."""
    # The environment is the user's, the run directory another person's: a value that the user has named needs no
    # consent. For code, only the module counts, because its functions are the same author's.
    known = {*mark.own, *(part for name in mark.variables for part in os.environ.get(name, "").split(","))}
    others = [text for text in _texts(value) if text and text not in known]
    if mark.what == "code":
        return [text for text in others if text.partition(":")[0] not in known]
    if mark.what == "host":
        return [text for text in others if not _is_here(text)]
    return [told for text in others if (told := _servers(text))]


def in_run_directory(file: Path) -> bool:
    """Whether a run file lies in a run directory, itself or what it is a link to."""
    return any(_is_run(place.parent) for place in (file.absolute(), file.resolve()))


def consented(run: Path, run_file: bytes) -> bool:
    """Whether `retouch train` of this user wrote this run file to this directory."""
    record = _record(run, run_file)
    if record is None:
        return False
    try:
        state = record.lstat()
    except OSError:
        return False
    own = state.st_uid == getattr(os, "getuid", lambda: 0)()  # the folder may be shared with other users
    return own and stat.S_ISREG(state.st_mode) and not state.st_mode & 0o022


def consent(run: Path, run_file: bytes, config: BaseModel) -> None:
    """Record that `retouch train` writes this run file to this directory. Where that cannot be recorded and it names
    code or hosts, a warning names the option that later commands need; what the environment names now is recorded as
    well, since that of a later command may not name it."""
    if consented(run, run_file):
        return
    record = _record(run, run_file)
    try:
        if record is None:
            raise OSError("there is no home directory")
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record.unlink(missing_ok=True)
        record.touch(mode=0o600, exist_ok=False)
    except OSError as error:
        if not (found := named(config)):
            return
        logger.warning(
            "%s names code or hosts (%s), and the consent to use them cannot be recorded (%s); commands on this run "
            "will need --trust",
            run / "config.yaml",
            ", ".join(map(".".join, found)),
            error,
        )


def require_consent(found: Mapping[Key, list[str]], overridden: Collection[Key], source: str) -> None:
    """Refuse what a run directory names without consent.

    Args:
        overridden: what the command line sets.

    Raises:
        ConfigError: all of it, and the option that is consent.
    """
    left = [
        f"{'.'.join(key)}: {shown(value, 200)}"
        for key, values in found.items()
        if not any(key[: len(one)] == one for one in overridden)
        for value in values
    ]
    if not left:
        return
    more = f"; and {len(left) - _MOST} more" if len(left) > _MOST else ""
    raise ConfigError(
        f"{source}: given code or hosts in a run directory that this user has not trained here: "
        f"{'; '.join(left[:_MOST])}{more}; expected none without consent; add --trust (Python: trust=True) if you "
        "trust whoever wrote it"
    )


def _is_run(folder: Path) -> bool:
    """Whether a folder has the files of a run beside a run file."""
    if not (folder / "config.yaml").exists():
        return False
    from retouch.files.complete import complete_checkpoints  # `retouch check` of the user's own file does not need it

    files = (folder / "environment.json", folder / "metrics.jsonl")
    return any(file.exists() for file in files) or bool(complete_checkpoints(folder / "checkpoints"))


def _record(run: Path, run_file: bytes) -> Path | None:
    """The file whose existence is consent; None without a home directory."""
    state = state_folder()
    place = hashlib.sha256(os.fsencode(run.resolve()) + b"\0" + hashlib.sha256(run_file).digest())
    return state and state / "trusted" / place.hexdigest()


def _texts(value: object) -> Iterator[str]:
    """The texts of a value, also those in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in cast("Mapping[object, object]", value).values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in cast("list[object]", value):
            yield from _texts(part)


def _is_here(address: str) -> bool:
    """Whether an address is on the loopback of this machine; one that cannot be used is not."""
    try:
        return is_local(base_url(address))
    except ValueError:
        return False


def _servers(text: str) -> str | None:
    """An address that is elsewhere, or an endpoints file with such addresses; None: neither."""
    from retouch.rewards.client.endpoints import read_endpoints

    if "://" in text:
        return None if _is_here(text) else text
    try:
        others = [entry["url"] for entry in read_endpoints(Path(text)) if not _is_here(entry["url"])]
    except (OSError, ValueError):  # reported where it is read
        return None
    return f"{text} ({', '.join(dict.fromkeys(others))})" if others else None
