"""The ``neaptide`` console command.

Exit codes: 0 done; 1 findings, something to read; 2 bad call or input; 3 conflict; 4 drift not
accepted; 5 verification failed; 130 interrupted. What people read is on stderr, --json on stdout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from neaptide import __version__, both_trees, commands, image, pinning, reproduce
from neaptide.bench import command as bench
from neaptide.disk import TEMPORARY_SUFFIX
from neaptide.doctor import command as doctor
from neaptide.errors import NeaptideError
from neaptide.git import GitError
from neaptide.ledger import command as ledger
from neaptide.ledger import template as profile_init
from neaptide.output import Progress, print_json
from neaptide.plans import command as plans
from neaptide.rebase import check
from neaptide.rebase import command as rebase
from neaptide.session import Options, Session
from neaptide.simulate import command as simulate
from neaptide.slabs import command as slabs

_COMMANDS = {
    "apply": "apply the series to unpacked sdists, checkouts or installed packages",
    "status": "say what is on disk at each target",
    "verify": "check again everything that was applied",
    "doctor": "say what is applied and active here, and which promised saving is not in force, and why",
    "revert": "put back the bytes that were there before",
    "export": "write the applied series as patches, with manifest and locks",
    "rebase": "plan the series on a release or commit that no pin names; with --accept, pin it",
    "check": "plan the series on many releases: what fits, what upstream changed",
    "pins": "list the pins, or record a pin's lock",
    "slabs": "bytes of PCIe channels at each pin, by the code that allocates them, upstream's own against patched",
    "plans": "bytes of the sparse indexer's plans at each pin, by the planner itself, upstream's own against patched",
    "simulate": "PyTorch's caching allocator on a recorded trace or a prefill ladder, without a device",
    "ledger": "every region of one rank of a deployment, by the code that allocates it, upstream's own against patched",
    "profile": "write a profile for the ledger",
    "reproduce": "run the verification of a finding, or say which hardware it needs",
    "bench": "measure the real engine, upstream's own against patched",
}

_OWN_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "bench": bench.add_options,
    "slabs": both_trees.add_options,
    "plans": both_trees.add_options,
    "ledger": ledger.add_options,
    "profile": profile_init.add_options,
    "simulate": simulate.add_options,
    "reproduce": reproduce.add_options,
}

# They read no tree of a pin themselves.
_WITHOUT_TREES = ("profile", "reproduce", "simulate")

_REBASING: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "rebase": rebase.add_options,
    "check": check.add_options,
}


def _pair(text: str) -> tuple[str, Path]:
    target, equals, folder = text.partition("=")
    if not equals or not target or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not TARGET=PATH")
    return target, Path(folder)


class _Parser(argparse.ArgumentParser):
    """Wrong arguments are refused like any other bad input."""

    def error(self, message: str) -> NoReturn:
        raise NeaptideError(message, wanted="a valid call", todo=f"See `{self.prog} --help`.")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="neaptide", description="Apply, re-check and ship a structural patch series for vLLM and b12x.",
        epilog=(__doc__ or "").split("\n\n", 1)[1],
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"neaptide {__version__}")
    subs = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        sub = subs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        _add_options(sub, name)
    return parser


def _add_options(sub: argparse.ArgumentParser, name: str) -> None:
    add = sub.add_argument
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--root", type=Path, default=None, help="the repository (default: found from here or the package)")
    if name not in _WITHOUT_TREES:
        add("--build", type=Path, default=None, help="folder of unpacked trees (default: ROOT/build)")
        add("--pin", default=None, help="the pin (default: current, or the pin that a checkout stands at)")
        add("--target", action="append", default=[], help="only this target (repeatable)")
    if name in _OWN_OPTIONS:
        _OWN_OPTIONS[name](sub)
        return
    if name == "doctor":
        doctor.add_options(sub)
    if name in _REBASING:
        _REBASING[name](sub)
        add(
            "--checkout",
            action="append",
            type=_pair,
            default=[],
            metavar="TARGET=DIR",
            help="for commits: a git checkout",
        )
        add("--frozen", action="store_true", help="no network: releases from the cache alone")
        if name == "rebase":
            add("--accept-drift", action="append", default=[], metavar="PATCH", help="this patch's drift was read")
            add("--dry-run", action="store_true", help="say what would be written")
        return
    add("--checkout", action="append", type=_pair, default=[], metavar="TARGET=DIR", help="a git checkout")
    add("--sdist", action="append", type=_pair, default=[], metavar="TARGET=FILE", help="an sdist already here")
    if name != "pins" and name != "export":
        add("--installed", action="store_true", help="the installed distributions")
        add("--python", default=None, help="with --installed: the environment of this interpreter")
    if name in ("apply", "revert", "pins"):
        add("--dry-run", action="store_true", help="plan and report, write nothing")
    if name == "apply":
        add("--patch", action="append", default=[], help="only this patch (repeatable)")
        add("--without", action="append", default=[], help="all but this patch (repeatable)")
        add("--accept-drift", action="append", default=[], metavar="PATCH", help="go on with this patch's drift")
        add("--frozen", action="store_true", help="the pin's lock must match; no network")
    if name == "verify":
        add("--frozen", action="store_true", help="what is applied must be what the pin's lock holds; no network")
        add("--image", default=None, metavar="REF", help="a local image instead: its labels, and its files inside")
    if name == "export":
        add("--output", type=Path, default=None, help="folder to write (default: BUILD/PIN/export)")
    if name == "pins":
        add("--lock", default=None, metavar="PIN", help="record guards, hashes and tree ids of this pin")


# As a shell has it for a process that SIGINT ended.
INTERRUPTED = 130


def find_root(given: Path | None) -> Path:
    """The folder that holds ``patches`` and ``overlay``: given, above here, or around the package."""
    places = [given] if given else [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]]
    for place in places:
        if (place / "patches" / "pins").is_dir():
            return place.resolve()
    raise NeaptideError(
        f"no patches/pins in {given or Path.cwd()}",
        wanted="the neaptide repository",
        todo="Run inside it, or give --root.",
    )


def _interpreter(given: str | None) -> Path | None:
    """An absolute path, its links kept; a bare name is looked up on PATH."""
    if given is None:
        return None
    found = shutil.which(given) if os.path.basename(given) == given else None
    return Path(found or given).absolute()


def _options(args: argparse.Namespace) -> Options:
    root = find_root(args.root)
    get = vars(args).get
    installed = bool(get("installed"))
    checkouts, sdists = get("checkout") or [], get("sdist") or []
    if installed and checkouts:
        raise NeaptideError("--installed with --checkout", wanted="one of the two", todo="Run the command twice.")
    if get("python") and not installed and args.command not in (*_OWN_OPTIONS, "doctor"):
        raise NeaptideError("--python without --installed", wanted="both", todo="Add --installed.")
    return Options(
        root=root,
        build=(get("build") or root / "build").resolve(),
        pin=get("lock") or get("pin"),
        targets=tuple(get("target") or ()),
        checkouts={t: p.resolve() for t, p in checkouts},
        sdists={t: p.resolve() for t, p in sdists},
        installed=installed,
        python=_interpreter(get("python")),
        only=tuple(get("patch") or ()),
        without=tuple(get("without") or ()),
        accept=tuple(get("accept_drift") or ()),
        frozen=bool(get("frozen")),
        dry_run=bool(get("dry_run")),
    )


def _run(args: argparse.Namespace, progress: Progress) -> commands.Result:
    options = _options(args)
    if args.command == "slabs":
        return slabs.run(options, progress)
    if args.command == "plans":
        return plans.run(options, progress)
    if args.command == "ledger":
        return ledger.run(args, options, progress)
    if args.command == "profile":
        return profile_init.run(args, progress)
    if args.command == "reproduce":
        return reproduce.run(args.finding, options.root, options.python, progress)
    if args.command == "simulate":
        return simulate.run(simulate.request_of(args, options.root), progress)
    if args.command == "bench":
        options = bench.options_for(args, options)
        return bench.run(args, options, Session(options, progress))
    if args.command == "rebase":
        return rebase.run(args, options, progress)
    if args.command == "check":
        return check.run(args, options, progress)
    session = Session(options, progress)
    output = args.output.resolve() if args.command == "export" and args.output else None
    run: dict[str, Callable[[], commands.Result]] = {
        "apply": lambda: commands.apply(session),
        "status": lambda: commands.status(session),
        "doctor": lambda: doctor.run(session, options, trees=args.trees),
        "verify": lambda: image.verify(session, args.image),
        "revert": lambda: commands.revert(session),
        "export": lambda: commands.export(session, output),
        "pins": lambda: pinning.lock_pin(session) if args.lock else pinning.pins(session),
    }
    return run[args.command]()


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    progress = Progress()
    command = ""
    try:
        args = build_parser().parse_args(given)
        command = args.command
        code, out = _run(args, progress)
    except KeyboardInterrupt:
        progress.note("interrupted; the next `neaptide apply` or `revert` recovers a write that was under way")
        return INTERRUPTED
    except (NeaptideError, GitError, OSError) as error:
        refusal = _refusal(error)
        code, out = refusal.code, {"error": refusal.as_dict()}
        progress.note(f"error: {refusal}")
    if "--json" in given:
        print_json({"command": command, "exit_code": int(code), **out})
    return int(code)


def _named(error: Exception) -> str:
    """What the system says, of the file that a person knows: not of the temporary one beside it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{str(error.filename).removesuffix(TEMPORARY_SUFFIX)}: {error.strerror}"
    return str(error)


def _refusal(error: Exception) -> NeaptideError:
    """Any failure that a person can mend, in the one form they read."""
    if isinstance(error, NeaptideError):
        return error
    if isinstance(error, GitError):
        text = " ".join(str(error).split())
        return NeaptideError(f"git failed ({text})", wanted="a sound repository", todo="Run git there by hand.")
    return NeaptideError(
        _named(error),
        wanted="a readable and writable place",
        todo="Check the path, its permissions and the free space.",
    )


if __name__ == "__main__":
    sys.exit(main())
