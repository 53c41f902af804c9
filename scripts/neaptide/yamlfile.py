"""YAML to a msgspec struct, with the line in every complaint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from neaptide.errors import NeaptideError

T = TypeVar("T")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")


def load_yaml(path: Path, kind: type[T]) -> T:
    """Read ``path`` as ``kind``; a syntax, duplicate-key or schema error names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise _complaint(path, line, f"not UTF-8 ({error.reason})", "UTF-8 text") from error
    try:
        node = yaml.compose(text, Loader=_LOADER)
        if node is None:
            raise _complaint(path, 1, "the file is empty", f"a {kind.__name__} header")
        _check_keys(path, node, ())
        data = yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise _complaint(path, _error_line(error, text), f"not YAML ({_reason(error)})", "well-formed YAML") from error
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        unknown = re.search(r"unknown field `(\w+)`", message)
        line = _line_of(node, where.strip("`") + (f".{unknown[1]}" if unknown else ""))
        raise _complaint(path, line, message, f"the fields of a {kind.__name__}") from error


def _reason(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)


def _error_line(error: yaml.YAMLError, text: str) -> int:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return int(mark.line) + 1
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position if isinstance(position, int) else 0) + 1


def _complaint(path: Path, line: int, found: str, wanted: str) -> NeaptideError:
    return NeaptideError(found, wanted=wanted, todo="Mend that line.", where=f"{path}:{line}")


def _check_keys(path: Path, node: yaml.Node, above: tuple[yaml.Node, ...]) -> None:
    """Refuse keys that stand twice or are no plain text, and an alias to what it stands in."""
    line = node.start_mark.line + 1
    if any(node is outer for outer in above):
        raise _complaint(path, line, "an alias to what it stands in", "a finite document")
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise _complaint(path, line, "a key that is no text", "quotes around a key that begins with {")
            if key.value in seen:
                raise _complaint(path, line, f"the key {key.value!r} stands twice", "each key once")
            seen.add(key.value)
            _check_keys(path, value, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(path, value, (*above, node))


def _line_of(node: yaml.Node, where: str) -> int:
    """Line of the deepest node that a msgspec path such as ``$.edits[0].file`` reaches."""
    line = node.start_mark.line + 1
    for name, index in _STEP.findall(where):
        if name and isinstance(node, yaml.MappingNode):
            pairs = {k.value: (k, v) for k, v in node.value}
            if name not in pairs:
                break
            key, node = pairs[name]
            line = key.start_mark.line + 1
        elif index.isdigit() and isinstance(node, yaml.SequenceNode):
            node = node.value[int(index)]
            line = node.start_mark.line + 1
        else:
            break
    return line
