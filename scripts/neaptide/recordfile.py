"""RECORD of an installed distribution: rows changed one by one, every other byte kept."""

from __future__ import annotations

import base64
import csv
import hashlib
import io


def _row(text: str) -> list[str]:
    return next(csv.reader([text]), [])


class RecordFile:
    """The rows of a RECORD file, in order."""

    def __init__(self, data: bytes) -> None:
        text = data.decode("utf-8")
        self._newline = "\r\n" if "\r\n" in text else "\n"
        lines = (line.removesuffix("\r") for line in text.split("\n"))
        self._lines = {(_row(line) or [""])[0]: line for line in lines if line}

    def names(self) -> list[str]:
        return list(self._lines)

    def set(self, name: str, data: bytes) -> None:
        """Give ``name`` the sha256 and size of ``data``; a new row goes last."""
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow([name, f"sha256={digest}", str(len(data))])
        self._lines[name] = out.getvalue()

    def drop(self, name: str) -> None:
        self._lines.pop(name, None)

    def drop_bytecode(self, name: str) -> None:
        """Drop the rows of a module's compiled forms, for every interpreter."""
        parent, _, file = name.rpartition("/")
        prefix = f"{parent}/__pycache__/{file.removesuffix('.py')}."
        for row in [n for n in self._lines if n.startswith(prefix) and n.endswith(".pyc")]:
            self.drop(row)

    def encode(self) -> bytes:
        return "".join(line + self._newline for line in self._lines.values()).encode("utf-8")
