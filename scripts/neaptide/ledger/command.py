"""The ``ledger`` command: regions of one rank of a profile, upstream's sizes beside the overlay's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from neaptide.both_trees import check
from neaptide.disk import check_writable
from neaptide.errors import ExitCode, NeaptideError
from neaptide.ledger.asking import COMMAND, Answers, ask
from neaptide.ledger.b12x_regions import CALLER, b12x_regions, reach_of
from neaptide.ledger.live import run_live
from neaptide.ledger.profiles import Profile, load_profile
from neaptide.ledger.regions import Region, by_lifetime, by_term, check_sums, total
from neaptide.ledger.show import findings, plot, show, write_csv
from neaptide.ledger.vllm_regions import OPS, vllm_regions
from neaptide.model import Patch
from neaptide.output import Progress
from neaptide.pins import DEFAULT_PIN, load_pin
from neaptide.plotting import check_plot
from neaptide.series import applies_to, load_series
from neaptide.session import Options

# Of the eras of vLLM, in the order of preference.
LOGITS_PATCHES = ("vllm/indexer-logits", "vllm/indexer-prefill-wide-keys")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("profile", metavar="PROFILE", nargs="?", help="a .toml file, or a name in profiles/: gate, turnkey, ...")
    add("--live", nargs="+", type=Path, default=[], metavar="FILE",
        help="instead: what workers of a patched engine wrote under VLLM_NEAPTIDE_LEDGER_FILE")  # fmt: skip
    add("--set", dest="changes", action="append", default=[], metavar="FIELD=VALUE",
        help="another value for a field of the profile (repeatable)")  # fmt: skip
    add("--csv", type=Path, default=None, metavar="FILE", help="the regions as CSV")
    add("--plot", type=Path, default=None, metavar="FILE", help="stacked bars, as SVG or PNG (needs matplotlib)")
    add("--python", default=None, help="an interpreter that has torch and what b12x imports (default: this one)")


def run(args: argparse.Namespace, options: Options, progress: Progress) -> tuple[ExitCode, dict[str, Any]]:
    """Asks both trees, and shows and writes what they say; or shows what an engine wrote.

    Returns:
        ``FINDINGS`` if a region has one, such as launches that find no memory.
    """
    if (args.profile is None) == (not args.live):
        raise NeaptideError(
            "a profile and --live" if args.live else "no profile", wanted="a profile, or --live with files",
            todo="For example: neaptide ledger turnkey.", where=COMMAND,
        )  # fmt: skip
    if args.live:
        given = {"--set": args.changes, "--csv": args.csv, "--plot": args.plot, "--pin": options.pin,
                 "--target": options.targets, "--python": options.python}  # fmt: skip
        for name in [name for name, value in given.items() if value]:
            raise NeaptideError(
                f"{name} with --live", wanted="files alone", todo="Leave it out; --json has all of them.", where=COMMAND
            )
        return run_live(args.live, progress)
    check_plot(args.plot)
    check_writable(args.csv, "--csv")
    profile = load_profile(options.root, args.profile, args.changes)
    check(options, ("b12x", "vllm"), COMMAND)
    pin = options.pin or DEFAULT_PIN
    (answers,) = ask([profile], pin, options, progress)
    found = ledger(profile, pin, options, answers)
    title = f"{profile.name} at {pin}: one rank"
    show(title, found, profile.kv_bytes_per_token, progress)
    if args.csv is not None:
        write_csv([region.as_dict() for region in found], args.csv)
    if args.plot is not None:
        plot(title, found, args.plot)
    return ExitCode.FINDINGS if findings(found) else ExitCode.DONE, as_json(profile, pin, found)


def ledger(profile: Profile, pin: str, options: Options, answers: tuple[Answers, Answers]) -> list[Region]:
    """The regions of a profile at a pin, whose sums are checked; only patches that apply there are named."""
    here = applied_patches(options.root, pin)
    known = {patch.id for patch in here}
    of_vllm, of_b12x = answers
    of_op = vllm_regions(profile, of_vllm, next(name for name in LOGITS_PATCHES if name in known))
    found = [
        *(without_op(region) if profile.engine == "fork" and region.owner in OPS else region for region in of_op),
        *b12x_regions(profile, of_b12x, reach_of(profile, CALLER in known)),
    ]
    regions = [replace(one.counted, patches=tuple(name for name in one.patches if name in known)) for one in found]
    check_sums(regions)
    return regions


def without_op(region: Region) -> Region:
    """A region of vLLM's own indexer in an engine that scores with b12x's."""
    return replace(region, reached=False, finding="", note="not reached: the fork scores with b12x's indexer")


def applied_patches(root: Path, pin: str) -> list[Patch]:
    """The patches of all series that have something to do at a pin."""
    targets = load_pin(root, pin).targets
    return [p for target, a in sorted(targets.items()) for p in load_series(root, target) if applies_to(p, a.version)]


def as_json(profile: Profile, pin: str, regions: Sequence[Region]) -> dict[str, Any]:
    """The form of ``--json``."""
    kv = profile.kv_bytes_per_token
    return {
        "profile": profile.for_child(),
        "pin": pin,
        "findings": findings(regions),
        "regions": [region.as_dict() for region in regions],
        "sums": {
            "all": total(regions).as_dict(kv),
            "by_lifetime": {name: one.as_dict(kv) for name, one in by_lifetime(regions).items()},
            "by_term": {name: one.as_dict(kv) for name, one in by_term(regions).items()},
        },
        "not_computed": [region.name for region in regions if not region.computed],
    }
