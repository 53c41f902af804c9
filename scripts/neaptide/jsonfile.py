"""JSON as neaptide writes it: sorted keys, two spaces, one final newline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from neaptide.errors import NeaptideError


def encode(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read(path: Path) -> Any:
    """Parsed content; a broken file is a clear error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NeaptideError(
            f"not JSON ({error})", wanted="a file that neaptide wrote", todo="Restore or remove it.", where=str(path)
        ) from error
