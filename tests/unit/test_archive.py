"""A hostile or damaged sdist is one clear error, and leaves nothing behind."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from neaptide import archive
from neaptide.errors import NeaptideError
from toy import PACKAGE, VERSION, ToyRepository

TOP = f"toy-{VERSION}"
Member = tuple[str, dict[str, object]]


def tar_of(*extra: Member, files: dict[str, str] = PACKAGE, top: str = TOP) -> bytes:
    """A tar of ``files`` under ``top``, then ``extra`` members: name and TarInfo fields (``data`` is the content)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        members = [(f"{top}/{name}", {"data": text.encode()}) for name, text in sorted(files.items())]
        for name, fields in [*members, *extra]:
            info = tarfile.TarInfo(name)
            data = fields.pop("data", b"")
            assert isinstance(data, bytes)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return raw.getvalue()


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    return name, {"type": kind, "linkname": to}


def pin_to(toy: ToyRepository, data: bytes) -> None:
    """Make ``data`` the sdist, with the sha256 that the pin names."""
    toy.sdist.write_bytes(data)
    pin = toy.root / "patches" / "pins" / "current.toml"
    digest = hashlib.sha256(data).hexdigest()
    pin.write_text(re.sub('sha256 = ".*"', f'sha256 = "{digest}"', pin.read_text()))


def around(toy: ToyRepository) -> list[str]:
    """Everything under the test's folder that is neither the toy repository's source nor an empty build folder."""
    root = toy.root.parent
    source = {toy.sdist, *(toy.root / "patches").rglob("*")}
    return sorted(
        str(p.relative_to(root)) for p in root.rglob("*") if p not in source and not (p.is_dir() and not p.is_symlink())
    ) + sorted(str(p.relative_to(root)) for p in toy.build.rglob(".*"))


def refused(toy: ToyRepository, capsys: pytest.CaptureFixture[str]) -> str:
    """The one error line of an apply that must leave nothing."""
    capsys.readouterr()
    code = toy.run("apply")
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert around(toy) == []
    assert code == 2
    assert len(errors) == 1
    return errors[0]


HOSTILE = {
    "a parent": (f"{TOP}/../evil.py", {"data": b"x"}),
    "a parent at the front": ("../evil.py", {"data": b"x"}),
    "an absolute path": ("/neaptide-evil.py", {"data": b"x"}),
    "a second top folder": ("other/evil.py", {"data": b"x"}),
    "a name that only begins like the top": (f"{TOP}-more/evil.py", {"data": b"x"}),
    "an absolute link": link(f"{TOP}/evil.py", "/etc/passwd"),
    "a link out": link(f"{TOP}/toy/evil.py", "../../evil"),
    "a link out and in again": link(f"{TOP}/evil.py", f"../../x/{TOP}/toy/core.py"),
    "a hard link out": link(f"{TOP}/evil.py", "../evil", tarfile.LNKTYPE),
    "an absolute hard link": link(f"{TOP}/evil.py", "/etc/passwd", tarfile.LNKTYPE),
    "a hard link to another top": link(f"{TOP}/evil.py", "other/x", tarfile.LNKTYPE),
    "a hard link to nothing": link(f"{TOP}/evil.py", f"{TOP}/nothing.py", tarfile.LNKTYPE),
    "a hard link to a folder": link(f"{TOP}/evil.py", f"{TOP}/dir", tarfile.LNKTYPE),
    "a device": (f"{TOP}/null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
    "a fifo": (f"{TOP}/fifo", {"type": tarfile.FIFOTYPE}),
    "the same file twice": (f"{TOP}/toy/core.py", {"data": b"x"}),
    "a file below a file": (f"{TOP}/toy/core.py/evil.py", {"data": b"x"}),
    "a repository's own configuration": (f"{TOP}/.git/config", {"data": b"[core]\n\tworktree = ../..\n"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_member_is_refused(toy: ToyRepository, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    member, fields = HOSTILE[name]
    folder = (f"{TOP}/dir", {"type": tarfile.DIRTYPE})
    pin_to(toy, gzip.compress(tar_of(folder, (member, dict(fields)))))
    assert str(toy.sdist) in refused(toy, capsys)
    assert not Path("/neaptide-evil.py").exists()


def test_a_chain_of_links_does_not_lead_out(toy: ToyRepository, capsys: pytest.CaptureFixture[str]) -> None:
    """Each link stays inside when read as text; followed on disk, each climbs one folder."""
    chain = [link(f"{TOP}/deep/a", ".."), link(f"{TOP}/b", "deep/a/..")]
    chain += [link(f"{TOP}/{name}", f"{before}/..") for before, name in zip("bcd", "cde", strict=True)]
    pin_to(toy, gzip.compress(tar_of(*chain, (f"{TOP}/e/evil.py", {"data": b"evil"}))))
    refused(toy, capsys)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive at all",
        gzip.compress(b""),
        gzip.compress(b"no tar"),
        tar_of(),
        gzip.compress(tar_of(files={})),
        gzip.compress(tar_of((TOP, {"data": b"a file"}), files={})),
        gzip.compress(tar_of(top="other-1.0")),
        b"PK\x03\x04" + b"\0" * 100,
    ],
    ids=["empty", "text", "empty gzip", "gzip of text", "not compressed", "no member", "a file", "other top", "zip"],
)
def test_what_is_no_sdist_is_refused(toy: ToyRepository, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    pin_to(toy, data)
    refused(toy, capsys)


WHOLE = gzip.compress(tar_of((f"{TOP}/toy/big.py", {"data": bytes(range(256)) * 200})))
STORED = gzip.compress(tar_of(), compresslevel=0)


@pytest.mark.parametrize("left", [1, 9, 20, 0.3, 0.6, 0.9, -600, -9, -8, -4, -1])
def test_a_truncated_archive_is_refused(toy: ToyRepository, left: float, capsys: pytest.CaptureFixture[str]) -> None:
    length = int(left * len(WHOLE)) if isinstance(left, float) else left
    pin_to(toy, WHOLE[:length])
    refused(toy, capsys)


def changed(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        *(changed(WHOLE, at) for at in (0, 2, 30, 200, len(WHOLE) // 2)),
        changed(STORED, STORED.index(b"class Pool")),
        changed(STORED, -8),
        changed(STORED, -4),
    ],
    ids=["magic", "method", "early", "later", "middle", "a stored byte", "crc", "length"],
)
def test_a_corrupted_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "toy.tar.gz"
    file.write_bytes(data)
    with pytest.raises(NeaptideError, match=r"toy\.tar\.gz"):
        archive.unpack(file, TOP, tmp_path / "out" / TOP)
    assert not list(tmp_path.rglob("*.py"))


@pytest.mark.parametrize("change", [lambda d: d + b"\0", lambda d: d[:-10], lambda d: changed(d, -1), lambda d: b""])
def test_another_sha256_is_refused(
    toy: ToyRepository, change: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    toy.sdist.write_bytes(change(toy.sdist.read_bytes()))
    error = refused(toy, capsys)
    assert hashlib.sha256(toy.sdist.read_bytes()).hexdigest() in error
    assert toy.sdist.name in error


@pytest.mark.parametrize("command", [("apply",), ("apply", "--dry-run"), ("pins", "--lock", "current")])
def test_a_refused_sdist_does_not_cost_the_tree_that_is_there(toy: ToyRepository, command: tuple[str, ...]) -> None:
    toy.lock()
    assert toy.run("apply") == 0
    mine = toy.tree / "notes.txt"
    mine.write_text("mine\n")
    pin_to(toy, gzip.compress(tar_of(files={**PACKAGE, "NEWS": "1\n"})))
    toy.sdist.write_bytes(b"damaged")
    assert toy.run(*command) == 2
    assert mine.is_file()
    assert (toy.tree / "toy/core.py").is_file()


def test_good_links_stay(toy: ToyRepository) -> None:
    toy.lock()
    links = [
        link(f"{TOP}/toy/same.py", "core.py"),
        link(f"{TOP}/docs/code", "../toy"),
        link(f"{TOP}/up", "docs/../toy/core.py"),
        link(f"{TOP}/toy/hard.py", f"{TOP}/toy/core.py", tarfile.LNKTYPE),
        (f"{TOP}/run.sh", {"data": b"#!/bin/sh\n", "mode": 0o4755}),
    ]
    pin_to(toy, gzip.compress(tar_of(*links)))
    assert toy.run("apply") == 0
    core = (toy.tree / "toy/core.py").read_text()
    assert (toy.tree / "toy/same.py").is_symlink()
    for name in ("toy/same.py", "docs/code/core.py", "up", "toy/hard.py"):
        assert (toy.tree / name).read_text() == core
    assert not (toy.tree / "toy/hard.py").is_symlink()
    assert (toy.tree / "run.sh").stat().st_mode & 0o7777 == 0o755
