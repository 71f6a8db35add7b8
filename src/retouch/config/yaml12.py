"""Run files as YAML 1.2 (core schema), with limits on their size.

PyYAML follows 1.1: it reads 1e-4 as a string, `no` (mixed precision) as false, 2025-01-01 (a name) as a date, 010 as 8,
1:30 as 90 and 1_000 as 1000. If a key occurs twice, it silently keeps the last.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_TEXT = 1_000_000
"""Maximum number of characters of a file."""

MAX_NODES = 100_000
"""Maximum number of values of a file, counting aliases as often as they are used."""

MAX_DEPTH = 50
MAX_DIGITS = 100

_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))
_REPLACED = (_BOOL, _INT, _FLOAT, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")

_SCALARS = (
    (_BOOL, r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    (_INT, r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (_FLOAT, r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$", "-+0123456789."),
    (_FLOAT, r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
)
"""Tag, pattern, first characters."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # PyYAML's own name
        if self.flow_level > MAX_DEPTH:  # the scanner's time grows with the square of the depth
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
        super().fetch_flow_collection_start(TokenClass)  # pyright: ignore[reportUnknownMemberType]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen = set[str]()
        for key in keys:
            if key.value in seen:
                raise _problem(key, f"the key {key.value!r} stands there twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def integer(self, node: yaml.ScalarNode) -> int:
        """Decimal whatever its zeros, 0o octal, 0x hexadecimal."""
        text = str(self.construct_scalar(node))
        if len(text) > MAX_DIGITS:
            raise _problem(node, f"a number of {len(text)} digits")
        bases = {"0o": 8, "0x": 16}
        try:
            return int(text, bases.get(text[:2], 10)) if "_" not in text else int("")
        except ValueError:
            raise _problem(node, f"{text!r} is not an integer") from None

    def number(self, node: yaml.ScalarNode) -> float:
        """A float."""
        text = str(self.construct_scalar(node))
        try:
            return float(re.sub(r"^([-+]?)\.(?=[iInN])", r"\1", text))
        except ValueError:
            raise _problem(node, f"{text!r} is not a number") from None


_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, in all wheels: five times as fast


class Dumper(_SafeDumper):
    """Quotes every string that `parse` would read as something else."""


def _resolve(kind: Any) -> None:
    for tag, pattern, first in _SCALARS:
        kind.add_implicit_resolver(tag, re.compile(pattern), list(first))


_resolve(_Loader)
_resolve(Dumper)
_Loader.add_constructor(_INT, _Loader.integer)
_Loader.add_constructor(_FLOAT, _Loader.number)


def parse(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: not YAML, or beyond the bounds.
    """
    if len(text) > MAX_TEXT:
        raise yaml.YAMLError(f"{len(text)} characters, over the limit of {MAX_TEXT}")
    loader: Any = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {}, ())
        return loader.construct_document(node)
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # explicit tags: `!!int x`, `!!timestamp 3`
        raise yaml.YAMLError(f"a tag that its value does not fit ({error})") from None
    except RecursionError:
        raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels") from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Values below a node, aliases counted wherever they stand."""
    # Aliases of aliases make billions of values of a few lines. They are counted as if each were written out, from one
    # visit of every node, before anything builds them.
    if id(node) in above:
        raise _problem(node, "an anchor that holds itself")
    if len(above) > MAX_DEPTH:
        raise _problem(node, f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, yaml.ScalarNode):
        node.value = _characters(node)
    if id(node) not in known:
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inside = list(node.value)
        known[id(node)] = 1 + sum(_size(part, known, (*above, id(node))) for part in inside)
    if known[id(node)] > MAX_NODES:
        raise _problem(node, f"over {MAX_NODES} values")
    return known[id(node)]


def _characters(node: yaml.ScalarNode) -> str:
    """The text of a scalar. Two escapes of a surrogate pair are one character, as in JSON, of which YAML is a superset;
    a null character and half of a pair are none."""
    if "\0" in node.value:
        raise _problem(node, "a null character")
    if node.value.isascii():
        return node.value
    try:
        return node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise _problem(node, "half of a surrogate pair, which is no character") from None


def _problem(node: yaml.Node, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=node.start_mark)
