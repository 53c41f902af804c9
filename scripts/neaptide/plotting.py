"""Plots, by matplotlib where it is installed."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neaptide.disk import check_writable, write_bytes
from neaptide.errors import NeaptideError

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path | None) -> None:
    """Refuse a plot that could not be written, before the work that it would show.

    Raises:
        NeaptideError: without matplotlib, or for a file of another kind.
    """
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise NeaptideError(f"{path.name!r}", wanted=f"a name in {', '.join(FORMATS)}", todo="Choose another name.",
                            where="--plot")  # fmt: skip
    check_writable(path, "--plot")
    if find_spec("matplotlib") is None:
        raise NeaptideError(
            "matplotlib is not installed", wanted="it for --plot", todo="pip install 'neaptide[bench]'.", where="--plot"
        )


def figure_of(width: float, height: float) -> Any:
    """An empty figure of inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that the name says, the same to the same bytes; its folder is made if needed."""
    from matplotlib import rc_context

    data = io.BytesIO()
    with rc_context({"svg.hashsalt": "neaptide"}):
        figure.savefig(data, format=path.suffix.removeprefix("."), metadata=_UNDATED.get(path.suffix))
    write_bytes(path, data.getvalue())


_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


Panels = Mapping[str, Sequence[tuple[str, Sequence[int]]]]


def plot_bytes(panels: Panels, along: str, what: str, path: Path, *, light: Collection[str] = ()) -> None:
    """One panel a title, one line a label; every third line is dotted, so that equal ones are both seen.

    Args:
        light: labels of thin lines behind the others. With some, all panels have one scale.
    """
    figure = figure_of(9, 3 * max(1, len(panels)))
    first = None
    for place, (title, lines) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, place, sharey=first if light else None)
        first = first or axes
        for number, (label, series) in enumerate(lines):
            gib = [value / 2**30 for value in series]
            style = _LIGHT if label in light else {"linestyle": ("-", "-", ":")[number % 3], "linewidth": 2}
            axes.plot(gib, label=label, drawstyle="steps-post", **style)
        axes.set(title=title, xlabel=along, ylabel=what)
        axes.legend(loc="center right" if light else "best")
        axes.grid(alpha=0.3)
    save(figure, path)


_LIGHT: dict[str, Any] = {"linewidth": 0.5, "color": "0.6", "zorder": 1}
