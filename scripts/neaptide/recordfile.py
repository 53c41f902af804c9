"""RECORD of an installed distribution: rows changed one by one, every other byte kept."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from pathlib import Path

# Those that the wheel format allows: sha256 and better.
HASHES = ("sha256", "sha384", "sha512")


def _row(text: str) -> list[str]:
    return next(csv.reader([text]), [])


def _written(digest: bytes) -> str:
    """A hash as RECORD has it: unpadded URL-safe base64."""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


class RecordFile:
    """The rows of a RECORD file, in order. A name may have more than one."""

    def __init__(self, data: bytes) -> None:
        text = data.decode("utf-8")
        self._newline = "\r\n" if "\r\n" in text else "\n"
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        self._lines: dict[str, list[str]] = {}
        for line in lines:
            if line:
                self._lines.setdefault((_row(line) or [""])[0], []).append(line)

    def names(self) -> list[str]:
        return list(self._lines)

    def set(self, name: str, data: bytes) -> None:
        """Give ``name`` the sha256 and size of ``data``; a new row goes last."""
        digest = _written(hashlib.sha256(data).digest())
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow([name, f"sha256={digest}", str(len(data))])
        self._lines[name] = [out.getvalue()]

    def problem(self, name: str, file: Path) -> str:
        """Why ``file`` is not as every row of ``name`` has it, for people; "" if it is, and for rows without a hash."""
        recorded = [hashed for line in self._lines[name] if (hashed := "".join(_row(line)[1:2]))]
        for how, _, value in (hashed.partition("=") for hashed in recorded):
            if how not in HASHES:
                return f"has a {how or 'nameless'} hash in RECORD, wanted one of {', '.join(HASHES)}"
            if not _has(file, how, value):
                return "is not as RECORD has it"
        return ""

    def drop(self, name: str) -> None:
        self._lines.pop(name, None)

    def drop_bytecode(self, name: str) -> None:
        """Drop the rows of a module's compiled forms, for every interpreter."""
        parent, _, file = name.rpartition("/")
        prefix = f"{parent}/__pycache__/{file.removesuffix('.py')}."
        for row in [n for n in self._lines if n.startswith(prefix) and n.endswith(".pyc")]:
            self.drop(row)

    def encode(self) -> bytes:
        return "".join(line + self._newline for lines in self._lines.values() for line in lines).encode("utf-8")


def _has(file: Path, how: str, value: str) -> bool:
    if not file.is_file():
        return False
    with open(file, "rb") as handle:
        return _written(hashlib.file_digest(handle, how).digest()) == value
