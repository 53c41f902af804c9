"""Running an ast-grep rule inside one symbol."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from ast_grep_py import SgNode, SgRoot

from neaptide.errors import NeaptideError
from neaptide.model import Rule
from neaptide.text import Source

_META = re.compile(r"\${1,3}([A-Z_][A-Z0-9_]*)")
_ANONYMOUS = re.compile(r"\$\$\$(?![A-Z_])")


@dataclass(frozen=True)
class Capture:
    """Captured text, where it stood, and the indentation of the line on which it begins."""

    text: str
    indentation: str
    origin: tuple[int, int]


@dataclass(frozen=True)
class Match:
    """One hit of a rule: its code-point range and its captures (``MATCH`` is the whole hit)."""

    start: int
    end: int
    captures: dict[str, Capture]


def rule_text(rule: Rule) -> str:
    """A rule on one line, as people write it."""
    return rule if isinstance(rule, str) else yaml.safe_dump(rule, default_flow_style=True, width=10**6).strip()


def check_rule(rule: Rule, where: str) -> None:
    """Refuse a rule that ast-grep cannot read, or whose pattern is not Python.

    ast-grep takes a pattern with a syntax error and matches nothing; that would look
    like a missing anchor.
    """
    for pattern in _patterns(rule):
        plain = _META.sub(lambda m: m.group(1).lower() + "_", _ANONYMOUS.sub("any_", pattern))
        root = SgRoot(plain, "python").root()
        if root.find(kind="ERROR") is not None or not plain.strip():
            raise NeaptideError(
                f"the pattern {pattern!r} does not parse", wanted="Python with $CAPTURES",
                todo="Mend the rule.", where=where,
            )  # fmt: skip
    try:
        _find_all(SgRoot("", "python").root(), rule)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise NeaptideError(
            f"ast-grep refuses the rule ({reason})", wanted="an ast-grep rule", todo="Mend the rule.", where=where
        ) from error


def _find_all(root: SgNode, rule: Rule) -> list[SgNode]:
    config: Any = {"rule": {"pattern": rule} if isinstance(rule, str) else rule}
    return root.find_all(config)


def _patterns(rule: Any) -> list[str]:
    if isinstance(rule, str):
        return [rule]
    found: list[str] = []
    for key, value in rule.items():
        if key == "pattern":
            text = value.get("context") if isinstance(value, dict) else value
            found += [text] if isinstance(text, str) else []
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                found += _patterns(item)
    return found


def find(
    source: Source,
    rule: Rule,
    span: tuple[int, int],
    keep: Callable[[int, int], bool] = lambda start, end: True,
) -> list[Match]:
    """All hits of ``rule`` inside the code-point range ``span`` for which ``keep(start, end)``."""
    names = sorted(set(_META.findall("\n".join(_patterns(rule)))))
    hits: dict[tuple[int, int], Match] = {}
    for node in _find_all(source.root, rule):
        start, end = _range(node)
        if span[0] <= start and end <= span[1] and keep(start, end):
            hits.setdefault((start, end), Match(start, end, _captures(source, node, names)))
    return [hits[key] for key in sorted(hits)]


def _range(node: SgNode) -> tuple[int, int]:
    place = node.range()
    return place.start.index, place.end.index


def _captures(source: Source, node: SgNode, names: list[str]) -> dict[str, Capture]:
    captures = {"MATCH": _capture(source, *_range(node))}
    for name in names:
        single = node.get_match(name)
        several = [single] if single is not None else node.get_multiple_matches(name)
        if several:
            captures[name] = _capture(source, _range(several[0])[0], _range(several[-1])[1])
        else:
            captures[name] = Capture("", "", (0, 0))
    return captures


def _capture(source: Source, start: int, end: int) -> Capture:
    return Capture(source.text[start:end], source.line_indentation(start), (start, end))
