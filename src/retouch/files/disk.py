"""One-line messages for file system errors that a user can fix."""

from __future__ import annotations

import errno
import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from retouch.errors import ConfigError
from retouch.process.replacing import beside

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
OBSTRUCTED = (errno.ENOTDIR, errno.EEXIST)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # bytes

_OS_ERROR = re.compile(r"serializing: .*\(os error (\d+)\)")  # safetensors' message
_CUT_OFF = re.compile(r"inline_container\.cc.*(unexpected pos|write)", re.DOTALL)  # torch's message


def expanded(path: str | Path) -> Path:
    """A path with the home directory in place of `~`; unchanged if there is no such user: it is then a path that does
    not exist.

    Raises:
        ConfigError: a path that is too long for a file system.
    """
    found = Path(os.path.expanduser(path))  # noqa: PTH111  pathlib raises a RuntimeError
    if len(os.fsencode(found)) > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in found.parts):
        raise ConfigError(f"{str(found)[:80]!r} ...: this path is too long; names have at most {_LONGEST_NAME} bytes")
    return found


def cache_folder() -> Path | None:
    """The folder of this package in the user's cache; None without a home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "retouch"
    except RuntimeError:
        return None


def state_folder() -> Path | None:
    """The folder of this package for what commands of this user remember of each other; None without a home
    directory."""
    root = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(root) if Path(root).is_absolute() else Path.home() / ".local/state") / "retouch"
    except RuntimeError:
        return None


def real_place(path: Path) -> Path:
    """A path whose name and parents are those on the disk, without `.`, `..` and links to folders. A link to a file
    keeps its name, which has the ending, as in the cache of the hub."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def file_in(path: str | Path, name: str) -> Path:
    """The file `name` of a folder; a path that is no folder itself. Raises as `expanded`."""
    found = expanded(path)
    return found / name if found.is_dir() else found


def on_disk(path: Path) -> Path:
    """A path with accents as the disk has them: macOS writes é as two characters (NFD), most programs write it as one
    (NFC). Unchanged if it exists, or if its other form does not either."""
    if str(path).isascii() or os.path.exists(path):  # noqa: PTH110  no error for names that are no path
        return path
    found = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        forms = (found / unicodedata.normalize(form, part) for form in ("NFC", "NFD"))
        found = next((place for place in forms if os.path.exists(place)), found / part)  # noqa: PTH110
    return found if os.path.exists(found) else path  # noqa: PTH110


def require_no_link(path: Path) -> None:
    """Refuse to write into what is no file: a link in a run directory, which may come from anybody, leads to any file
    of the user; opening a pipe waits for its other end.

    Raises:
        ConfigError: a link, a pipe, a device or a folder is in the place of the file.
    """
    if path.is_symlink():
        raise ConfigError(f"{path} is not a file; delete it, which is a link to {path.readlink()}")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file; delete it")


def append_to(path: Path) -> int:
    """The descriptor of a file that is appended to, created if there is none. Raises as `require_no_link`."""
    require_no_link(path)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


def write_whole(path: Path, text: str) -> None:
    """Write a file at once: a reader, or a start after a kill, never finds a part of it."""
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def write_first(path: Path, text: str) -> bool:
    """Write a file at once, if it does not exist -> whether this process wrote it, which one of several does."""
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS or path.exists():
                raise
            temporary.replace(path)
    return True


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a file, which is neither a pipe, which would be waited for, nor a device.

    Args:
        most: its size in bytes, at most.

    Raises:
        OSError: not a file, or larger.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a file", str(path))
    if path.stat().st_size > most:
        raise OSError(errno.EINVAL, f"more than {most} bytes", str(path))
    return path.read_bytes()


def is_own(folder: Path, path: Path, most: int) -> bool:
    """Whether a file of a folder, which may come from anybody, may be shown: neither it nor a folder on the way is a
    link that leads out, to any file of this machine, and it has `most` bytes at most. A missing file may; the folder
    itself may be a link.
    """
    try:
        if path.is_symlink() or not path.resolve().is_relative_to(folder.resolve()):
            return False
        return not path.exists() or (path.is_file() and path.stat().st_size <= most)
    except (OSError, RuntimeError):  # a circle of links, or where this user may not look
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within it, other processes wait that get here for the same file, which need not exist; on file systems without
    locks they do not."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False))
        yield


@contextmanager
def only_writer(folder: Path, option: str = "--out") -> Iterator[None]:
    """Within it, no other process gets here for the same folder. The kernel ends the lock with this process; on file
    systems and machines without locks there is none.

    Args:
        folder: exists.
        option: sets the folder, for the message.

    Raises:
        ConfigError: another process is there.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process is writing there; wait for it, or choose another {option}"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield
    finally:
        os.close(held)


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder at any depth, also behind links to folders, each folder once and without its link if it has
    a place of its own below the first; none that is hidden or in a hidden folder, which programs make for themselves.
    """
    seen, own, linked = set[tuple[int, int]](), [str(folder)], list[str]()
    while own or linked:
        place = own.pop() if own else linked.pop(0)
        try:
            state = os.stat(place)  # noqa: PTH116
        except OSError:  # it went away meanwhile
            continue
        if (state.st_dev, state.st_ino) in seen:
            continue
        seen.add((state.st_dev, state.st_ino))
        folders: list[os.DirEntry[str]] = []
        with suppress(PermissionError), os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_folder(entry):
                    folders.append(entry)
                else:
                    yield Path(entry.path)
        for entry in sorted(folders, key=lambda entry: entry.name):
            (linked if entry.is_symlink() else own).append(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder. A link that leads nowhere, in a circle or where this user may not look is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether a path from a list or an option is a file; a name that is too long for one is not."""
    try:
        return path.is_file()
    except OSError:
        return False


WHERE = "logging.dir or --out"


@contextmanager
def writing(place: Path | str, options: str = "--out") -> Iterator[None]:
    """Add the path to write errors that do not name it, and convert those of torch and safetensors to OSError.

    Args:
        options: the options or arguments that set the path, for the message.

    Raises:
        OSError: with its number and path.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = str(place)
        raise _marked(error, place, options)  # noqa: B904
    except Exception as error:
        if type(error).__name__ == "SafetensorError" and (told := _OS_ERROR.search(str(error))):
            number = int(told[1])
            raise _marked(OSError(number, os.strerror(number), str(place)), place, options) from error
        if isinstance(error, RuntimeError) and _CUT_OFF.search(str(error)):
            cut_off = OSError(errno.ENOSPC, "writing was cut off, as on a full disk", str(place))
            raise _marked(cut_off, place, options) from error
        raise


def file_problem(error: OSError) -> str | None:
    """The path, the problem and the remedy; None for another kind of error. Another place is advised only for files to
    write, not for files to read."""
    # Writing code marks an error with its place and the options that name it. Only where the path lies in that place
    # was it to be written, and another place helps.
    path = None if error.filename is None else str(error.filename)
    place, options = getattr(error, _MARK, (None, WHERE))
    written = path is not None and place is not None and _together(Path(path), Path(place))
    where = "" if path is None else f"{path}: "
    reason = (error.strerror or "").lower()
    if error.errno in _FULL:
        return f"{where}{reason}; free space, or set {options} to another disk"
    if path is None:
        return None
    if error.errno in _CLOSED:
        return f"{where}{reason}; change its permissions" + (
            f", or set {options} to a writable folder" if written else ""
        )
    if error.errno == errno.ENOENT and getattr(error, "is_of_output", False):
        return f"{where}{reason}; set {options} to a writable folder"
    if error.errno == errno.EINVAL and reason == "not a file":
        return f"{where}{reason}; give the path of a file"
    if error.errno == errno.EISDIR:
        return f"{error.filename2 or path}: a folder exists where a file is expected; move it away"
    if error.errno in OBSTRUCTED and (error.errno == errno.ENOTDIR or not Path(path).is_dir()):
        return f"{where}a file exists where a folder is expected" + (f"; set {options} to a folder" if written else "")
    return None


_MARK = "retouch_place"


def _marked(error: OSError, place: Path | str, options: str) -> OSError:
    """Add the place, unless an inner one is set."""
    if not hasattr(error, _MARK):
        setattr(error, _MARK, (str(place), options))
    return error


def _together(path: Path, place: Path) -> bool:
    """Whether one contains the other."""
    path, place = path.absolute(), place.absolute()
    return path.is_relative_to(place) or place.is_relative_to(path)
