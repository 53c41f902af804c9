"""What upstream did with a symbol that an edit anchors on, and where a missing one may have gone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from neaptide.anchor import find
from neaptide.guard import docstring_node, node_guard
from neaptide.model import Rule
from neaptide.rebase.bodies import Bag, bag, definitions, identifiers, likeness, share
from neaptide.symbols import DEFINITIONS, MODULE, find_symbol
from neaptide.text import Source, parsed

ALIKE = 0.5
SPLIT_PART = 0.15
SPLIT_TOGETHER = 0.6
NAMES, NAMES_NEEDED = 6, 3
MOST_CANDIDATES = 5
_DEFINITION = re.compile(rb"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)


class Fate(StrEnum):
    """What became of a symbol between two releases."""

    UNCHANGED = "unchanged"
    REFORMATTED = "reformatted"
    CHANGED = "changed"
    RENAMED = "renamed"
    MOVED = "moved"
    SPLIT = "split"
    DELETED = "deleted"
    NEW = "not in the pin"


@dataclass(frozen=True)
class Candidate:
    """A place where a symbol, or a part of it, may be now.

    Attributes:
        likeness: of the bodies, 0 to 1.
        matches: hits of the edit's rule there; None without a rule.
    """

    file: str
    symbol: str
    likeness: float
    matches: int | None = None


@dataclass(frozen=True)
class Whereabouts:
    """The fate of a symbol, and candidates, the likeliest first."""

    fate: Fate
    candidates: tuple[Candidate, ...] = ()

    def todo(self) -> str:
        """What a maintainer does next, in one sentence."""
        best = self.candidates[0] if self.candidates else None
        if best is None:
            nothing = "nothing like it is left: read upstream's change, then write the edit anew or retire the patch"
            return nothing if self.fate is Fate.DELETED else "read upstream's change of the symbol and mend the rule"
        place = f"{best.file} {best.symbol}"
        if self.fate is Fate.SPLIT:
            with_rule = [c for c in self.candidates if c.matches == 1]
            places = ", ".join(f"{c.file} {c.symbol}" for c in (with_rule or self.candidates))
            return f"the body is now in {places}: anchor there"
        exact = " (the rule has one match there)" if best.matches == 1 else ""
        return f"look at {place}{exact}: {best.likeness:.0%} of the body is the same"


class Finder:
    """Searches a release for what a symbol of the pin has become.

    Args:
        old, new: modules by path inside the package, of the pin and of the release.
    """

    def __init__(self, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> None:
        self.old, self.new = old, new
        self._sources: dict[tuple[bool, str], Source | None] = {}
        self._definitions: dict[tuple[bool, str], dict[str, ast.AST]] = {}
        self._bags: dict[tuple[str, str], Bag] = {}

    @cached_property
    def _texts(self) -> list[str]:
        return sorted(path for path in self.new if path.endswith(".py"))

    @cached_property
    def _grown(self) -> dict[str, Bag]:
        """Names that more definitions of a module have than of the pin's module: only there may a symbol be new."""
        return {path: _named(self.new[path]) - _named(self.old.get(path, b"")) for path in self._texts}

    def source(self, path: str, *, old: bool) -> Source | None:
        key = (old, path)
        if key not in self._sources:
            data = (self.old if old else self.new).get(path)
            self._sources[key] = None if data is None else _if_parsed(data)
        return self._sources[key]

    def about(self, file: str, symbol: str, rule: Rule | None = None, *, search: bool = True) -> Whereabouts:
        """What became of ``symbol`` of ``file``; without ``search`` a changed one is not looked for in others."""
        before = self.source(file, old=True)
        was = find_symbol(before.tree, symbol) if before is not None else None
        after = self.source(file, old=False)
        now = find_symbol(after.tree, symbol) if after is not None else None
        if symbol == MODULE:
            return self._module(file, before, after)
        if before is None or was is None:
            return Whereabouts(Fate.NEW if now is not None else Fate.DELETED)
        if after is not None and now is not None:
            return self._changed(file, (before, was), (after, now), rule, search)
        return self._missing(file, symbol, was, rule)

    def _module(self, file: str, before: Source | None, after: Source | None) -> Whereabouts:
        if after is not None:
            if before is not None and before.text == after.text:
                return Whereabouts(Fate.UNCHANGED)
            return Whereabouts(Fate.CHANGED if before is not None else Fate.NEW)
        if before is None:
            return Whereabouts(Fate.DELETED)
        # The module that most of its definitions are in now.
        named = [name for name, _ in definitions(before.tree) if "." not in name]
        found: dict[str, int] = {}
        for path in self._texts:
            if path not in self.old and any(_defines(self.new[path], n) for n in named):
                source = self.source(path, old=False)
                here = {n for n, _ in definitions(source.tree)} if source is not None else set()
                found[path] = sum(n in here for n in named)
        best = sorted(found, key=lambda p: (-found[p], p))[:MOST_CANDIDATES]
        candidates = tuple(Candidate(p, MODULE, found[p] / len(named)) for p in best if 2 * found[p] >= len(named))
        return Whereabouts(Fate.MOVED if candidates else Fate.DELETED, candidates)

    def _changed(
        self, file: str, was: tuple[Source, ast.AST], now: tuple[Source, ast.AST], rule: Rule | None, search: bool
    ) -> Whereabouts:
        if node_guard(was[1]) == node_guard(now[1]):
            same = _text(*was) == _text(*now)
            return Whereabouts(Fate.UNCHANGED if same else Fate.REFORMATTED)
        lost = bag(was[1]) - bag(now[1])
        parts = self._parts(file, lost, was[1], rule) if search and sum(lost.values()) >= 2 else []
        return Whereabouts(Fate.SPLIT, tuple(parts)) if parts else Whereabouts(Fate.CHANGED)

    def _missing(self, file: str, symbol: str, was: ast.AST, rule: Rule | None) -> Whereabouts:
        name = symbol.rsplit(".", 1)[-1].split("#")[0]
        if not isinstance(was, DEFINITIONS):
            elsewhere = tuple(self._assigned(symbol, was)[:MOST_CANDIDATES])
            return Whereabouts(Fate.MOVED if elsewhere else Fate.DELETED, elsewhere)
        mine = bag(was)
        near = [c for c in self._candidates(file, name, was, mine, rule) if c.likeness >= ALIKE]
        parts = self._parts(file, mine, was, rule)
        if near and (len(parts) < 2 or isinstance(was, ast.ClassDef)):
            best = near[0]
            same_name = best.symbol.rsplit(".", 1)[-1] == name
            fate = Fate.RENAMED if best.file == file and not same_name else Fate.MOVED
            return Whereabouts(fate, tuple(near[:MOST_CANDIDATES]))
        return Whereabouts(Fate.SPLIT, tuple(parts)) if parts else Whereabouts(Fate.DELETED)

    def _assigned(self, name: str, was: ast.AST) -> list[Candidate]:
        """Modules that assign a constant of this name now and did not."""
        out = []
        for path in self._texts:
            if name.encode() in self.new[path] and not self._was_there(path, name):
                source = self.source(path, old=False)
                node = find_symbol(source.tree, name) if source is not None else None
                if node is not None:
                    out.append(Candidate(path, name, float(node_guard(node) == node_guard(was))))
        return sorted(out, key=lambda c: (-c.likeness, c.file))

    def _candidates(self, file: str, name: str, was: ast.AST, mine: Bag, rule: Rule | None) -> list[Candidate]:
        """Definitions of the same kind, by likeness; of equals first the same name, then the same file."""
        found = []
        for path in self._worth_reading(file, name, was):
            for symbol, node in self._defined(path).items():
                if isinstance(node, ast.ClassDef) != isinstance(was, ast.ClassDef) or self._was_there(path, symbol):
                    continue
                like = self._like(path, symbol, node, mine)
                if like >= SPLIT_PART or symbol.rsplit(".", 1)[-1] == name:
                    found.append((like, symbol.rsplit(".", 1)[-1] == name, path == file, path, symbol, node))
        found.sort(key=lambda f: (-f[0], not f[1], not f[2], f[3], f[4]))
        return [Candidate(f[3], f[4], f[0], self._matches(f[3], f[5], rule)) for f in found]

    def _parts(self, file: str, lost: Bag, was: ast.AST, rule: Rule | None) -> list[Candidate]:
        """New definitions, each with a part of its own, that hold most of what a symbol lost; none if they do not."""
        pieces = []
        for path in self._worth_reading(file, "", was):
            for symbol, node in self._defined(path).items():
                if isinstance(node, ast.ClassDef) or self._was_there(path, symbol):
                    continue
                held = share(self._bag(path, symbol, node), lost)
                if held >= SPLIT_PART:
                    pieces.append((held, path, symbol, node))
        pieces.sort(key=lambda p: (-p[0], p[1], p[2]))
        together, found = Bag(), []
        for held, path, symbol, node in pieces:
            # A copy, or a function inside another, adds nothing to what is found already.
            added = together | (self._bags[path, symbol] & lost)
            if share(added, lost) - share(together, lost) >= SPLIT_PART:
                together = added
                found.append(Candidate(path, symbol, held, self._matches(path, node, rule)))
        return found[:MOST_CANDIDATES] if share(together, lost) >= SPLIT_TOGETHER else []

    def _worth_reading(self, file: str, name: str, was: ast.AST) -> Iterator[str]:
        """Modules that may hold it: its own; of those with new definitions the ones with its name or rarest words."""
        rare = [n.encode() for n in identifiers(was, NAMES)]
        needed = min(NAMES_NEEDED, len(rare))
        for path in self._texts:
            data = self.new[path]
            if path != file and not self._grown[path]:
                continue
            # Every other new class has an __init__, which says nothing.
            by_name = name in self._grown[path] and not name.startswith("__")
            if path == file or by_name or (needed and sum(n in data for n in rare) >= needed):
                yield path

    def _defined(self, path: str, *, old: bool = False) -> dict[str, ast.AST]:
        """Definitions of a module by qualified name, the first of each name."""
        if (old, path) not in self._definitions:
            source = self.source(path, old=old)
            found = list(definitions(source.tree)) if source is not None else []
            self._definitions[old, path] = dict(reversed(found))
        return self._definitions[old, path]

    def _was_there(self, path: str, symbol: str) -> bool:
        """Whether the pin has this symbol, too: then it is not what another one became."""
        if symbol in self._defined(path, old=True):
            return True
        before = self.source(path, old=True)
        return before is not None and find_symbol(before.tree, symbol) is not None

    def _bag(self, path: str, symbol: str, node: ast.AST) -> Bag:
        if (path, symbol) not in self._bags:
            self._bags[path, symbol] = bag(node)
        return self._bags[path, symbol]

    def _like(self, path: str, symbol: str, node: ast.AST, mine: Bag) -> float:
        return likeness(self._bag(path, symbol, node), mine)

    def _matches(self, path: str, node: ast.AST, rule: Rule | None) -> int | None:
        source = self.source(path, old=False)
        return None if rule is None or source is None else len(find(source, rule, source.span(node)))


def _text(source: Source, node: ast.AST) -> str:
    """The text of a definition without its docstring, which no guard sees."""
    start, end = source.span(node)
    text, own = source.text[start:end], docstring_node(node)
    if own is None:
        return text
    low, high = source.span(own)
    return text[: low - start] + text[high - start :]


def _named(data: bytes) -> Bag:
    """Names after ``def`` and ``class`` in a module's text."""
    return Counter(name.decode(errors="replace") for name in _DEFINITION.findall(data))


def _defines(data: bytes, name: str) -> bool:
    return f"def {name}(".encode() in data or f"class {name}".encode() in data


def _if_parsed(data: bytes) -> Source | None:
    try:
        return parsed(data)
    except (SyntaxError, ValueError):
        return None


def described(places: Sequence[Candidate]) -> list[dict[str, object]]:
    """Candidates as JSON."""
    return [
        {"file": c.file, "likeness": round(c.likeness, 3), "rule_matches": c.matches, "symbol": c.symbol}
        for c in places
    ]
