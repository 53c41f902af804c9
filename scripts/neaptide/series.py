"""Loading a series: the order file, the patch folders, and what is refused before any upstream is read."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from neaptide.errors import NeaptideError
from neaptide.model import CODE_REF, Anchor, Condition, Edit, Header, Overlay, Patch, expand
from neaptide.symbols import DEFINITIONS, MODULE, is_symbol_name
from neaptide.yamlfile import load_yaml

_PLACEHOLDERS = {"pkg": "pkg", "PREFIX": "PREFIX"}
_SYMBOLS = "a symbol such as Outer.inner, name#2, NAME or <module>"
_NAME = re.compile(r"^[a-z0-9][a-z0-9-]*$")


def read_series(folder: Path) -> list[str]:
    """Patch names of ``folder/series`` in order; ``#`` starts a comment."""
    path = folder / "series"
    if not path.is_file():
        raise NeaptideError("no series file", wanted="one patch name a line", todo="Create it.", where=str(path))
    names: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name = line.split("#", 1)[0].strip()
        if not name:
            continue
        if not _NAME.match(name) or name in names:
            raise NeaptideError(
                f"{name!r}", wanted="a lower-case patch name, once", todo="Mend that line.",
                where=f"{path}:{number}",
            )  # fmt: skip
        names.append(name)
    return names


def load_series(root: Path, target: str) -> list[Patch]:
    """All patches of ``patches/TARGET/series``, validated."""
    folder = root / "patches" / target
    patches: list[Patch] = []
    for name in read_series(folder):
        patches.append(_load_patch(root, target, folder / name))
        _check_after(patches)
    return patches


def check_known(names: Iterable[str], patches: Iterable[Patch], where: str = "") -> None:
    """Refuse names, with or without their target, that no patch has."""
    ids = {p.id: p.name for p in patches}
    for name in names:
        if name not in ids and name not in ids.values():
            raise NeaptideError(
                f"no patch {name!r} in the series", wanted=f"one of {', '.join(sorted(ids))}",
                todo="Check the spelling.", where=where,
            )  # fmt: skip


def select(patches: Sequence[Patch], only: Iterable[str], without: Iterable[str]) -> list[Patch]:
    """A subset of the series, which must be closed under ``after``."""
    only, without = set(only), set(without)
    check_known(sorted(only | without), patches)
    chosen = [p for p in patches if (not only or only & {p.name, p.id}) and not without & {p.name, p.id}]
    names = {p.name for p in chosen}
    for patch in chosen:
        missing = [a for a in patch.header.after if a not in names]
        if missing:
            raise NeaptideError(
                f"{patch.id} is chosen without {', '.join(missing)}", wanted="a set closed under `after`",
                todo="Choose those too, or leave this patch out.",
            )  # fmt: skip
    return chosen


def applicable(specifier: str, version: str) -> bool:
    return Version(version) in SpecifierSet(specifier, prereleases=True)


def edits_for(patch: Patch, version: str) -> list[Edit]:
    """The edits of a patch for one version: the common ones, then those of every era that applies."""
    if not applicable(patch.header.applies, version):
        return []
    edits = list(patch.header.edits)
    for era in patch.header.eras:
        if applicable(era.applies, version):
            edits.extend(era.edits)
    return edits


def requires_for(patch: Patch, version: str) -> list[Anchor]:
    """Code that the patch relies on at a version."""
    eras = [e for e in patch.header.eras if applicable(e.applies, version)]
    return [*patch.header.requires, *(anchor for era in eras for anchor in era.requires)]


def overlays_for(patch: Patch, version: str) -> list[Overlay]:
    if not applicable(patch.header.applies, version):
        return []
    return [o for o in patch.header.overlay if applicable(o.applies, version)]


def overlay_source(patch: Patch, overlay: Overlay) -> Path:
    """The overlay file in the repository: ``overlay/TARGET/SRC`` beside ``patches``."""
    return patch.folder.parents[2] / "overlay" / patch.target / overlay.src


def applies_to(patch: Patch, version: str) -> bool:
    """Whether a patch has anything to do at a version."""
    eras = patch.header.eras
    if eras and not any(applicable(e.applies, version) for e in eras):
        return False
    return bool(edits_for(patch, version) or overlays_for(patch, version))


def _load_patch(root: Path, target: str, folder: Path) -> Patch:
    path = folder / "patch.yaml"
    if not path.is_file():
        raise NeaptideError(
            "no patch.yaml", wanted=f"a folder for the series entry {folder.name}",
            todo="Create it or take the line out of the series.", where=str(path),
        )  # fmt: skip
    header = load_yaml(path, Header)
    _check_header(path, header)
    for edit in header.all_edits:
        _check_edit(folder, edit)
    sources = [root / "overlay" / target / o.src for o in header.overlay]
    for overlay, source in zip(header.overlay, sources, strict=True):
        _check_overlay(path, header, overlay, source)
    return Patch(target=target, name=folder.name, folder=folder, header=header, digest=_digest(folder, header, sources))


def _digest(folder: Path, header: Header, overlays: Sequence[Path]) -> str:
    """sha256 over all that decides the applied bytes: ``patch.yaml``, code files, overlay files; not the test."""
    matches = [CODE_REF.match(code) for edit in header.all_edits for code in edit.codes()]
    files = sorted({folder / m["file"] for m in matches if m is not None})
    total = hashlib.sha256()
    for path in [folder / "patch.yaml", *files, *overlays]:
        total.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _refuse(path: Path, found: str, wanted: str, todo: str = "Mend the patch.") -> NeaptideError:
    return NeaptideError(found, wanted=wanted, todo=todo, where=str(path))


def _check_header(path: Path, header: Header) -> None:
    specifiers = [header.applies, *(o.applies for o in header.overlay), *(e.applies for e in header.eras)]
    conditions = [c for c in (header.retire_when, header.superseded_when) if c is not None]
    specifiers += [leaf.version for c in conditions for leaf in c.leaves if leaf.version is not None]
    for text in specifiers:
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise _refuse(path, f"{text!r}", "version specifiers such as '>=1.1,<1.2.6'") from error
    for condition in conditions:
        for leaf in condition.leaves:
            _check_condition(path, leaf)
    for anchor in [*header.requires, *(a for era in header.eras for a in era.requires)]:
        _check_anchor(path, anchor)
    if not header.forwarded.startswith("https://") and header.forwarded not in ("no", "not-needed"):
        raise _refuse(path, f"forwarded: {header.forwarded!r}", "an https URL, no, or not-needed")
    if not (header.edits or header.eras or header.overlay):
        raise _refuse(path, "neither edits, eras nor overlay", "something to apply")


def _check_condition(path: Path, condition: Condition) -> None:
    if (condition.version is None) == (condition.anchor is None):
        raise _refuse(path, "a condition without exactly one of version and anchor", "one of the two, or all: [...]")
    if condition.version is not None and not condition.version.strip():
        raise _refuse(path, "a condition on every version", "a version specifier such as '>=0.34'")
    if condition.anchor is not None:
        _check_anchor(path, condition.anchor)


def _check_anchor(path: Path, anchor: Anchor) -> None:
    inside_package(path, anchor.file)
    if not is_symbol_name(expand(anchor.symbol, _PLACEHOLDERS)):
        raise _refuse(path, f"anchor on {anchor.symbol!r}", _SYMBOLS)


def _check_edit(folder: Path, edit: Edit) -> None:
    path = folder / "patch.yaml"
    where = f"edit of {edit.file} {edit.symbol}"
    inside_package(path, edit.file)
    if len(edit.operations) != 1 or edit.delete is False or getattr(edit, edit.operation) == {}:
        found = ", ".join(edit.operations) or "no operation"
        raise _refuse(path, f"{where}: {found}", "exactly one operation")
    operation = edit.operation
    if not is_symbol_name(expand(edit.symbol, _PLACEHOLDERS)):
        raise _refuse(path, where, _SYMBOLS)
    if (operation == "import_") != (edit.symbol == MODULE):
        raise _refuse(path, f"{where}: {operation.rstrip('_')}", "import on <module>, and nothing else there")
    if operation in ("wrap", "argument", "delete") and edit.match is None:
        raise _refuse(path, f"{where}: {operation} without match", "a match rule")
    if operation in ("default", "constant", "import_") and edit.match is not None:
        raise _refuse(path, f"{where}: {operation.rstrip('_')} with match", "no match rule")
    if operation != "import_" and not edit.expectations:
        raise _refuse(path, f"{where}: no expect", "a rule about upstream's code around the edit")
    if (edit.count != 1) != bool(edit.count_reason):
        raise _refuse(path, f"{where}: count {edit.count}", "count_reason, and only with a count above 1")
    if edit.wrap is not None and "$MATCH" not in edit.wrap and not CODE_REF.match(edit.wrap):
        raise _refuse(path, f"{where}: wrap without $MATCH", "$MATCH where the matched text goes")
    _check_code_refs(folder, edit)


def _check_code_refs(folder: Path, edit: Edit) -> None:
    for code in edit.codes():
        found = CODE_REF.match(code)
        if found is None:
            continue
        inside_package(folder / "patch.yaml", found["file"])
        path = folder / found["file"]
        if not path.is_file():
            raise _refuse(folder / "patch.yaml", f"no file {found['file']}", "the code that the edit names")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            raise _refuse(path, f"not Python ({error})", "Python in UTF-8") from error
        names = sorted(n.name for n in tree.body if isinstance(n, DEFINITIONS))
        if found["function"] not in names:
            raise _refuse(path, f"no function {found['function']}", f"one of {', '.join(names)}")


def _check_overlay(path: Path, header: Header, overlay: Overlay, source: Path) -> None:
    inside_package(path, overlay.src)
    inside_package(path, overlay.dest)
    if not source.is_file():
        raise _refuse(path, f"no overlay file {overlay.src}", f"the file {source}")
    if overlay.dest in {e.file for e in header.all_edits}:
        raise _refuse(path, f"an edit targets the overlay file {overlay.dest}", "the change in the overlay itself")


def inside_package(path: Path, name: str) -> None:
    """Refuse a path that leaves the package."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not pure.parts:
        raise _refuse(path, f"the path {name!r} leaves the package", "a path inside the package")


def _check_after(patches: Sequence[Patch]) -> None:
    last = patches[-1]
    earlier = {p.name for p in patches[:-1]}
    for name in last.header.after:
        if name not in earlier:
            raise _refuse(last.folder / "patch.yaml", f"after: {name!r}", "a patch that stands earlier in the series")


def after_closure(patch: Patch, patches: Sequence[Patch]) -> set[str]:
    """Names of all patches that ``patch`` comes after, directly or not."""
    by_name = {p.name: p for p in patches}
    todo, seen = list(patch.header.after), set()
    while todo:
        name = todo.pop()
        if name in by_name and name not in seen:
            seen.add(name)
            todo.extend(by_name[name].header.after)
    return seen
