"""JSON as neaptide writes it: sorted keys, two spaces, one final newline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from neaptide.errors import NeaptideError

T = TypeVar("T")


def encode(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read(path: Path, parse: Callable[[Any], T]) -> T:
    """What ``parse`` makes of the content; a broken file, or one of another shape, is a clear error."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NeaptideError(
            f"not readable ({type(error).__name__}: {error})", wanted="a file that neaptide wrote",
            todo="Restore or remove it.", where=str(path),
        ) from error  # fmt: skip
