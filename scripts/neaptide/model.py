"""The patch format: what ``patch.yaml`` may hold, as frozen structs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Rule = str | dict[str, Any]
Text = Annotated[str, Meta(min_length=1)]

CODE_REF = re.compile(r"^(?P<file>[\w./-]+\.py)#(?P<function>[A-Za-z_]\w*)$")
STATEMENT_OPERATIONS = ("before", "after", "start", "end")
OPERATIONS = (
    "replace", *STATEMENT_OPERATIONS, "wrap", "argument", "default", "constant", "import_", "delete",
)  # fmt: skip


class Edit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"import_": "import"}):
    """One structural change inside one upstream file (DESIGN, section 3)."""

    file: Text
    symbol: Text
    match: Rule | None = None
    count: Annotated[int, Meta(ge=1)] = 1
    count_reason: str | None = None
    replace: str | None = None
    before: str | None = None
    after: str | None = None
    wrap: str | None = None
    start: str | None = None
    end: str | None = None
    argument: dict[str, str] | None = None
    default: dict[str, str] | None = None
    constant: str | None = None
    import_: str | None = None
    delete: bool | None = None
    expect: Rule | list[Rule] | None = None

    @property
    def operations(self) -> list[str]:
        return [name for name in OPERATIONS if getattr(self, name) is not None]

    @property
    def operation(self) -> str:
        return self.operations[0]

    def codes(self) -> Iterator[str]:
        """Every piece of new code: of the operation, or of each argument or default it sets."""
        value = getattr(self, self.operation)
        yield from value.values() if isinstance(value, dict) else [value] if isinstance(value, str) else []

    @property
    def expectations(self) -> list[Rule]:
        if self.expect is None:
            return []
        return self.expect if isinstance(self.expect, list) else [self.expect]


class Anchor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place that may appear upstream: a symbol, and optionally a rule with a hit inside it."""

    file: Text
    symbol: Text
    match: Rule | None = None


class Condition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition the tool can check: a version bound, an anchor that appears, or several of these."""

    version: str | None = None
    anchor: Anchor | None = None
    all: list[Condition] | None = None

    @property
    def leaves(self) -> list[Condition]:
        """The single conditions, all of which must hold."""
        return [leaf for part in self.all for leaf in part.leaves] if self.all is not None else [self]


class Overlay(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A module of ours and where it goes inside the package."""

    src: Text
    dest: Text
    mode: Literal["new", "replace"]
    applies: str = ""


class Era(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Edits and relied-on code for the versions that ``applies`` admits, beside the patch's common ones."""

    applies: Text
    edits: list[Edit] = []
    requires: list[Anchor] = []


class Recovery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the patch gives back: bytes in a configuration, and which pins' engines reach it."""

    bytes: int
    configuration: Text
    reached: dict[str, bool]


class TestChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An upstream test whose outcome this patch changes, and why that is right."""

    id: Text
    reason: Text


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``patch.yaml``. ``requires`` names code that the patch relies on without editing it; it is guarded, too."""

    title: Text
    description: Text
    origin: Text
    forwarded: Text
    reason: Literal["temporary", "needed-to-build", "incompatible-by-design"]
    recovers: Annotated[list[Recovery], Meta(min_length=1)]
    test: Text
    retire_when: Condition
    superseded_when: Condition | None = None
    after: list[str] = []
    applies: str = ""
    expected_test_changes: list[TestChange] = []
    requires: list[Anchor] = []
    overlay: list[Overlay] = []
    edits: list[Edit] = []
    eras: list[Era] = []

    @property
    def all_edits(self) -> list[Edit]:
        """The edits of every era."""
        return [*self.edits, *(e for era in self.eras for e in era.edits)]


class Patch(Struct, frozen=True, kw_only=True):
    """A patch as loaded: its header, its place in the repository, and its identity.

    ``digest`` is the sha256 over what decides the applied bytes: ``patch.yaml``, code files, overlay files.
    """

    target: str
    name: str
    folder: Path
    header: Header
    digest: str

    @property
    def id(self) -> str:
        return f"{self.target}/{self.name}"


def expand(value: Any, names: dict[str, str]) -> Any:
    """``{pkg}`` and ``{PREFIX}`` in every string of a rule or code, from ``names``."""
    if isinstance(value, str):
        for name, text in names.items():
            value = value.replace("{" + name + "}", text)
        return value
    if isinstance(value, list):
        return [expand(item, names) for item in value]
    if isinstance(value, dict):
        return {key: expand(item, names) for key, item in value.items()}
    return value


def expand_edit(edit: Edit, names: dict[str, str]) -> Edit:
    return msgspec.structs.replace(
        edit,
        **{f: expand(getattr(edit, f), names) for f in edit.__struct_fields__},
    )
