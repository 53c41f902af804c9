"""Releases, and what a new release did to an anchor in each: outcome, fate of the symbol, likeliest place, todo."""

from __future__ import annotations

from dataclasses import dataclass

from bumped import CORE, FILES, Files, changed
from neaptide.outcomes import EditOutcome, Status
from neaptide.rebase.describe import todo
from neaptide.rebase.planning import Planned
from neaptide.rebase.whereabouts import Fate, Whereabouts


def taken(symbol: str) -> str:
    """The text of a top-level function or of a method of ``CORE``."""
    start = CORE.index(f"def {symbol}(")
    indentation = " " * (start - CORE.rindex("\n", 0, start) - 1)
    ends = [i for word in ("def ", "class ") if (i := CORE.find(f"\n{indentation}{word}", start)) > 0]
    return CORE[start : min([*ends, CORE.find("\n\n\n", start) % len(CORE)])].rstrip() + "\n"


def dedented(symbol: str) -> str:
    return taken(symbol).replace("\n    ", "\n")


ADMIT_TEXT, TOTAL_TEXT = taken("admit"), taken("total")
# ``admit`` keeps its name and gives its body away; or it goes, in three parts.
_START, _LOOP, _REPORT, _END = (ADMIT_TEXT.index(f"    {word} ") for word in ("ordered", "for", "waiting", "return"))
START, LOOP, REPORT = ADMIT_TEXT[_START:_LOOP], ADMIT_TEXT[_LOOP:_REPORT], ADMIT_TEXT[_REPORT:_END]
HELPERS = f"""def choose(requests, capacity, reserve):
{START}{LOOP}    return admitted, remaining


def summarise(requests, admitted, remaining):
{REPORT}    return report
"""
SHELL = """def admit(requests, capacity, reserve=0):
    admitted, remaining = choose(requests, capacity, reserve)
    return admitted, summarise(requests, admitted, remaining)
"""
THREE = f"""def rank(requests, capacity, reserve):
{START}    return ordered, remaining, admitted


def take(ordered, remaining, admitted):
{LOOP}    return remaining


def sum_up(requests, admitted, remaining):
{REPORT}    print(report)
    print(longest)
    return [report, None]
"""
HALF = """

def admit_some(requests, capacity):
    ordered = sorted(requests, key=len)
    remaining = capacity
    admitted = []
    for request in ordered:
        remaining -= needed
        admitted.append(request)
    return admitted
"""


@dataclass(frozen=True)
class Case:
    """A release, and what is to be said of one edit on it.

    ``first`` is the likeliest place, ``file symbol``; ``says`` stands in the todo.
    """

    patch: str
    symbol: str
    files: Files
    status: Status
    fate: Fate | None = None
    first: str = ""
    says: str = ""
    version: str = "1.2.1"


READ = "read upstream's change"
CASES = {
    "unchanged": Case("total", "Pool.total", FILES, Status.CLEAN),
    "a comment, line breaks": Case(
        "total", "Pool.total",
        changed(("result = 0\n        for item in items:", "result = (0)  # new\n        for item in (\n  items\n ):")),
        Status.CLEAN,
    ),
    "renamed": Case(
        "admit", "admit", changed(("def admit(", "def accept(")), Status.CONFLICT, Fate.RENAMED, "core.py accept",
        "look at core.py accept (the rule has one match there)",
    ),
    "renamed and changed, with a lesser copy": Case(
        "admit", "admit", changed(("def admit(", "def accept("), ("share = remaining //", "share = capacity //"),
                                  ("\n\ndef scale(", HALF + "\n\ndef scale(")),
        Status.CONFLICT, Fate.RENAMED, "core.py accept", "look at core.py accept (the rule has one match there)",
    ),
    "a method renamed, its twin was there": Case(
        "total", "Pool.total", changed(("def total(", "def sum(")), Status.CONFLICT, Fate.RENAMED, "core.py Pool.sum",
        "look at core.py Pool.sum (the rule has one match there): 100% of the body is the same",
    ),
    "deleted, its twin was there": Case(
        "total", "Pool.total", changed((f"    {TOTAL_TEXT}\n", "")), Status.CONFLICT, Fate.DELETED, "",
        "nothing like it is left",
    ),
    "its class renamed": Case(
        "total", "Pool.total", changed(("class Pool", "class Basin")), Status.CONFLICT, Fate.MOVED,
        "core.py Basin.total", "look at core.py Basin.total (the rule has one match there)",
    ),
    "moved to another module": Case(
        "admit", "admit", changed((ADMIT_TEXT, ""), admission="import math\n\n\n" + ADMIT_TEXT), Status.CONFLICT,
        Fate.MOVED, "admission.py admit", "look at admission.py admit (the rule has one match there): 100%",
    ),
    "moved and renamed": Case(
        "admit", "admit",
        changed((ADMIT_TEXT, ""), admission="import math\n\n\n" + ADMIT_TEXT.replace("admit(", "let_in(")),
        Status.CONFLICT, Fate.MOVED, "admission.py let_in", "look at admission.py let_in",
    ),
    "a method become a function elsewhere": Case(
        "total", "Pool.total", changed((f"    {TOTAL_TEXT}\n", ""), sums="import math\n\n\n" + dedented("total")),
        Status.CONFLICT, Fate.MOVED, "sums.py total", "look at sums.py total (the rule has one match there)",
    ),
    "moved without the anchored statement": Case(
        "admit", "admit",
        changed((ADMIT_TEXT, ""), admission=ADMIT_TEXT.replace("remaining -= needed", "remaining = -needed")),
        Status.CONFLICT, Fate.MOVED, "admission.py admit", "look at admission.py admit: ",
    ),
    "of two equal bodies the one of its name": Case(
        "admit", "admit",
        changed((ADMIT_TEXT, ""), aaa=ADMIT_TEXT.replace("admit(", "let_in("), zzz=ADMIT_TEXT),
        Status.CONFLICT, Fate.MOVED, "zzz.py admit", "look at zzz.py admit",
    ),
    "split, the name kept": Case(
        "admit", "admit", changed((ADMIT_TEXT, f"{SHELL}\n\n{HELPERS}")), Status.CONFLICT, Fate.SPLIT, "core.py choose",
        "the body is now in core.py choose: anchor there",
    ),
    "split over two modules": Case(
        "admit", "admit", changed((ADMIT_TEXT, SHELL), parts="import math\n\n\n" + HELPERS), Status.CONFLICT,
        Fate.SPLIT, "parts.py choose", "the body is now in parts.py choose: anchor there",
    ),
    "split, the name gone": Case(
        "admit", "admit", changed((ADMIT_TEXT, HELPERS)), Status.CONFLICT, Fate.SPLIT, "core.py choose",
        "the body is now in core.py choose: anchor there",
    ),
    "split in three, the name gone": Case(
        "admit", "admit", changed((ADMIT_TEXT, THREE)), Status.CONFLICT, Fate.SPLIT, "core.py take",
        "the body is now in core.py take: anchor there",
    ),
    "deleted": Case("admit", "admit", changed((ADMIT_TEXT, "")), Status.CONFLICT, Fate.DELETED, "",
                    "write the edit anew or retire the patch"),
    "deleted, a lesser copy is new": Case(
        "admit", "admit", changed((ADMIT_TEXT, HALF.lstrip())), Status.CONFLICT, Fate.DELETED, "",
        "nothing like it is left",
    ),
    "renamed and much changed": Case(
        "admit", "admit",
        changed(("def admit(", "def accept("), ("ordered = sorted(requests, key=len)", "ordered = list(requests)"),
                ("math.ceil(len(request) / 2)", "len(request)"), ("share = remaining", "share = capacity"),
                ("default=0)", "default=1)"), ("[r for r in requests if r not in admitted]", "[]")),
        Status.CONFLICT, Fate.RENAMED, "core.py accept", "look at core.py accept (the rule has one match there): ",
    ),
    "changed around the anchor": Case(
        "total", "Pool.total", changed(("return result\n\n    def subtotal", "return -result\n\n    def subtotal")),
        Status.MOVED, Fate.CHANGED, "", f"{READ}; nothing has to be mended",
    ),
    "changed in the anchor": Case(
        "admit", "admit", changed(("for request in ordered", "for request in ordered[1:]")),
        Status.DRIFT, Fate.CHANGED, "", f"{READ}; if the edit still holds, --accept-drift toy/admit",
    ),
    "the anchored statement twice": Case(
        "admit", "admit",
        changed(("        admitted.append(", "        remaining -= needed\n        admitted.append(")),
        Status.CONFLICT, Fate.CHANGED, "", f"{READ} of the symbol and mend the rule",
    ),
    "defined twice": Case(
        "admit", "admit", changed(("def scale(", "def admit(requests):\n    return requests\n\n\ndef scale(")),
        Status.CONFLICT, Fate.UNCHANGED, "", "mend the rule",
    ),
    "what it is for is gone": Case(
        "admit", "admit", changed(("        admitted.append(request)\n", "        admitted += [request]\n")),
        Status.UNMET, Fate.CHANGED, "", "mend the edit",
    ),
    "a constant moved": Case(
        "limit", "LIMIT", changed(("LIMIT = 8 * 1024\n", "from toy.limits import LIMIT\n"), limits="LIMIT = 8 * 1024\n",
                                  a_decoy="LIMIT = 3\n"),
        Status.CONFLICT, Fate.MOVED, "limits.py LIMIT", "look at limits.py LIMIT: 100%",
    ),
    "a constant deleted": Case(
        "limit", "LIMIT", changed(("LIMIT = 8 * 1024\n", ""), ("int = LIMIT", "int = 1")), Status.CONFLICT,
        Fate.DELETED, "", "nothing like it is left",
    ),
    "a constant's value": Case(
        "limit", "LIMIT", changed(("LIMIT = 8 * 1024", "LIMIT = 9 * 1024")), Status.DRIFT, Fate.CHANGED, "",
        "--accept-drift toy/limit",
    ),
    "a module renamed": Case(
        "limit", "<module>", {**{k: v for k, v in FILES.items() if k != "toy/core.py"}, "toy/engine.py": CORE},
        Status.CONFLICT, Fate.MOVED, "engine.py <module>", "look at engine.py <module>",
    ),
    "a function of a renamed module": Case(
        "admit", "admit", {**{k: v for k, v in FILES.items() if k != "toy/core.py"}, "toy/engine.py": CORE},
        Status.CONFLICT, Fate.MOVED, "engine.py admit", "look at engine.py admit (the rule has one match there): 100%",
    ),
    "a module deleted": Case(
        "limit", "<module>", {k: v for k, v in FILES.items() if k != "toy/core.py"}, Status.CONFLICT, Fate.DELETED, "",
        "nothing like it is left",
    ),
    "relied-on code changed": Case(
        "relies", "scale", changed(("factor=2", "factor=3")), Status.DRIFT, Fate.CHANGED, "",
        "--accept-drift toy/relies",
    ),
    "relied-on code moved": Case(
        "relies", "scale", changed((taken("scale"), ""), scaling=taken("scale")), Status.CONFLICT, Fate.MOVED,
        "scaling.py scale", "look at scaling.py scale",
    ),
    "upstream has a file of that name": Case(
        "relies", "<module>", changed(new="Y = 1\n"), Status.CONFLICT, Fate.NEW, "", READ,
    ),
    "an era that no pin has": Case(
        "later", "dismiss", changed((ADMIT_TEXT, ADMIT_TEXT + "\n\n" + ADMIT_TEXT.replace("admit(", "dismiss("))),
        Status.DRIFT, Fate.NEW, "", "--accept-drift toy/later", version="1.3.0",
    ),
}  # fmt: skip


def said_of(planned: Planned, case: Case) -> tuple[EditOutcome, Whereabouts | None]:
    """The outcome of the case's edit (or requirement, or overlay), and its whereabouts."""
    patch = next(p for p in planned.plan.patches if p.patch.name == case.patch)
    outcome = next(o for o in patch.outcomes if o.symbol == case.symbol and not o.key.startswith("names:"))
    if case.patch == "relies" and case.symbol == "<module>":
        outcome = next(o for o in patch.outcomes if o.key.startswith("overlay:"))
    return outcome, planned.about(outcome)


def check(planned: Planned, case: Case) -> None:
    outcome, where = said_of(planned, case)
    best = where.candidates[0] if where is not None and where.candidates else None
    found = (outcome.status, where.fate if where else None, f"{best.file} {best.symbol}" if best else "")
    assert found == (case.status, case.fate, case.first), outcome.detail
    text = todo(planned, outcome, frozenset())
    assert case.says in text
    assert bool(text) == (case.status is not Status.CLEAN)
    assert case.status is Status.CLEAN or outcome.detail
