"""``neaptide profile init``: a commented profile, with the values of a running engine if a dump of them is given."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neaptide.disk import write_bytes
from neaptide.errors import ExitCode, NeaptideError
from neaptide.ledger.fields import FIELDS, SECTIONS
from neaptide.ledger.profiles import checked
from neaptide.output import Progress

# By the start of an architecture's name.
MODELS = {
    "DeepseekV32": "deepseek_v32", "GlmMoeDsa": "deepseek_v32", "Glm5Next": "glm5next", "DeepseekV41": "deepseek_v41",
}  # fmt: skip
ABSENT = object()
CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=["init"], help="init: write a profile to fill in")
    add("--from", dest="dump", type=Path, default=None, metavar="DUMP", help="JSON of vLLM's configuration")
    add("--output", type=Path, default=None, metavar="FILE", help="where to write it (default: stdout)")


def run(args: argparse.Namespace, progress: Progress) -> tuple[ExitCode, dict[str, Any]]:
    """Writes the profile.

    Raises:
        NeaptideError: a dump that lacks a field, or whose values are no profile; a file that exists.
    """
    values = {} if args.dump is None else dumped(read_dump(args.dump), str(args.dump))
    text = template(values)
    if args.output is None:
        if not args.json:
            print(text, end="")
    elif args.output.exists():
        raise NeaptideError(
            "it exists", wanted="a new file", todo="Move it away, or choose another.", where=str(args.output)
        )
    else:
        write_bytes(args.output, text.encode())
        progress.note(f"wrote {args.output}")
    return ExitCode.DONE, {"output": str(args.output) if args.output else None, "text": text}


def template(values: Mapping[str, str]) -> str:
    """A TOML file of every field with its meaning; ``values`` in place of the examples."""
    lines = ["# A profile for `neaptide ledger`: one rank of a deployment. docs/ledger.md has the details."]
    for name, field in FIELDS.items():
        if name in SECTIONS:
            lines += ["", f"# {SECTIONS[name]}"]
        lines += [f"# {field.meaning}", f"{name} = {values.get(name, field.example)}"]
    return "\n".join(lines) + "\n"


def read_dump(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _refused(f"no JSON ({error})", str(path)) from error
    if not isinstance(found, dict):
        raise _refused(f"a {type(found).__name__}", str(path))
    return found


def _refused(found: str, where: str) -> NeaptideError:
    return NeaptideError(
        found,
        wanted="the form of docs/ledger.md, A dump",
        todo="Correct the dump, and run the command again.",
        where=where,
    )


def dumped(dump: Mapping[str, Any], where: str) -> dict[str, str]:
    """Values of a dump, as TOML has them.

    Raises:
        NeaptideError: a field that is missing, or of another kind; the message has its path.
    """
    values = {}
    for name, field in FIELDS.items():
        if not field.dumped:
            continue
        found = _at(dump, field.dumped)
        if found is ABSENT or (found is None and name not in ("largest_capture_rows",)):
            if field.optional:
                continue
            raise _refused(f"no {field.dumped}, which {name} is taken from", where)
        try:
            values[name] = json.dumps(_converted(name, found))
        # Whatever a dump holds in its place: no text, no list, an infinite number, none at all.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _refused(f"{field.dumped} is {json.dumps(found)[:60]}, no {name}", where) from error
    data = {name: json.loads(values.get(name, field.example)) for name, field in FIELDS.items()}
    checked({"name": "dump", **data}, where)
    return values


def _at(dump: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(dump, dict) or part not in dump:
            return ABSENT
        dump = dump[part]
    return dump


def _converted(name: str, found: Any) -> Any:
    """A profile's value from a dump's."""
    if name == "runner":
        return {True: "v2", False: "v1"}[found]
    if name == "model":
        known = {model for start, model in MODELS.items() if found.startswith(start)}
        return known.pop()
    if name == "full_graphs":
        return "FULL" in CUDAGRAPH_MODES[CUDAGRAPH_MODES.index(found)]
    if name == "architecture":
        return {9: "sm90", 10: "sm100", 12: "sm120"}[found[0]]
    if name == "kv_bytes_per_token":
        return int(found["bytes"]) // int(found["tokens"])
    if name == "largest_capture_rows":
        return int(found or 0)
    return found
