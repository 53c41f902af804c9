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
    text = path.read_text(encoding="utf-8")
    try:
        node = yaml.compose(text, Loader=_LOADER)
        if node is None:
            raise _complaint(path, 1, "the file is empty", f"a {kind.__name__} header")
        _refuse_duplicates(path, node)
        data = yaml.load(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise _complaint(path, line, f"not YAML ({error.problem})", "well-formed YAML") from error
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at ")
        line = _line_of(node, where.strip("`"))
        raise _complaint(path, line, message, f"the fields of a {kind.__name__}") from error


def _complaint(path: Path, line: int, found: str, wanted: str) -> NeaptideError:
    return NeaptideError(found, wanted=wanted, todo="Mend that line.", where=f"{path}:{line}")


def _refuse_duplicates(path: Path, node: yaml.Node) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise _complaint(path, line, f"the key {key.value!r} stands twice", "each key once")
            seen.add(key.value)
            _refuse_duplicates(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicates(path, value)


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
