"""The applied series as files: a format-patch series, one integration patch, and the lab's lock."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from neaptide import __version__, disk, jsonfile
from neaptide.errors import NeaptideError
from neaptide.git import DIFF_OPTIONS, Repo, bare_view
from neaptide.gitplace import GitPlace
from neaptide.places import Place, Record, State, described

MANIFEST = "manifest.json"
LAB_LOCK = "integration.lock.json"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_applied(place: Place) -> None:
    """Refuse to export what is not the series as it was applied."""
    if place.state() is not State.APPLIED:
        raise NeaptideError(
            f"the tree is {described(place)}", wanted="an applied series, as it was applied",
            todo="Put the files back, or run `neaptide apply`; nothing was written.", where=place.label,
        )  # fmt: skip


def export_place(place: GitPlace, folder: Path) -> dict[str, Any]:
    """Write ``folder`` anew from what is applied at ``place`` (:func:`check_applied`); the same input gives the same
    bytes.

    Returns:
        What was written: file names with sha256, and why the lab's lock was left out, if it was.
    """
    record = place.record()
    assert record is not None
    with bare_view(place.repo) as view:
        files = _series_files(view, record)
        patch = view.run("diff", *DIFF_OPTIONS, record.base["commit"], record.result["commit"])
    files["integration.patch"] = patch
    manifest = _manifest(place, record, files)
    files[MANIFEST] = jsonfile.encode(manifest)
    without_lock = _no_lab_lock(place)
    if not without_lock:
        files[LAB_LOCK] = jsonfile.encode(_lab_lock(place, record, manifest["name"], files))
    _replace_folder(folder, files)
    return {
        "files": {name: _sha256(data) for name, data in sorted(files.items())},
        "folder": str(folder),
        "lab_lock": without_lock or "written",
        "target": place.target,
        "tree": record.result["tree"],
    }


def _series_files(view: Repo, record: Record) -> dict[str, bytes]:
    scratch = view.top / "export"
    view.run(
        "format-patch", "--output-directory", str(scratch), "--no-signature", "--zero-commit", "--no-stat",
        "--no-cover-letter", "--no-numbered", "--encode-email-headers", *DIFF_OPTIONS,
        f"{record.base['commit']}..{record.result['commit']}",
    )  # fmt: skip
    return {p.name: p.read_bytes() for p in sorted(scratch.glob("*.patch"))}


def _manifest(place: GitPlace, record: Record, files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "artefact": dict(record.artefact),
        "base_tree": record.base["tree"],
        "files": {name: _sha256(data) for name, data in sorted(files.items())},
        "name": f"neaptide-{place.pin.name}-{place.target}",
        "patches": [{k: p[k] for k in ("digest", "id", "status")} for p in record.patches],
        "result_tree": record.result["tree"],
        "schema_version": 1,
        "tool_version": __version__,
    }


def _no_lab_lock(place: GitPlace) -> str:
    """Why the lab's lock cannot be written here, or nothing."""
    record = place.record()
    if record is not None and record.artefact.get("sdist"):
        return "not written: an sdist is no commit of a repository; export from a checkout"
    if not _repository(place):
        return "not written: neither the pin nor a remote named origin says which repository this is"
    return ""


def _repository(place: GitPlace) -> str:
    return place.artefact.repository or place.repo.origin()


def _lab_lock(place: GitPlace, record: Record, name: str, files: dict[str, bytes]) -> dict[str, Any]:
    """``integration.lock.json`` in the shape that the lab's image builds read."""
    base = record.base["commit"]
    ref = place.artefact.ref if base == place.artefact.commit else None
    return {
        "base": {"commit": base, "ref": ref or _ref_of(place, base), "repository": _repository(place)},
        "manifest": {"sha256": _sha256(files[MANIFEST])},
        "name": name,
        "pull_requests": [],
        "result": {
            "patch": "integration.patch",
            "patch_sha256": _sha256(files["integration.patch"]),
            "tree": record.result["tree"],
        },
        "schema_version": 1,
    }


def _ref_of(place: GitPlace, commit: str) -> str:
    """A ref that contains the base: the branch at HEAD, else the first remote or tag that does."""
    head = place.repo.head_ref()
    if head != "HEAD":
        return head
    refs = place.repo.text("for-each-ref", "--contains", commit, "--count=1", "--format=%(refname)")
    return refs or commit


def _replace_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Bring ``folder`` to ``files``; only what an earlier export lists is removed, and nothing else is touched."""
    listed = _listed(folder)
    for name, data in sorted(files.items()):
        if not (folder / name).is_file() or (folder / name).read_bytes() != data:
            disk.write_bytes(folder / name, data)
    for name in sorted(listed - set(files)):
        disk.remove(folder / name)


def _listed(folder: Path) -> set[str]:
    """File names of the earlier export in ``folder``; refuses a folder that holds something else."""
    if not folder.exists() or not any(folder.iterdir()):
        return set()
    manifest = folder / MANIFEST
    names = jsonfile.read(manifest, _names_of) if manifest.is_file() else None
    if names is None:
        raise NeaptideError(
            "the folder holds other files", wanted="an earlier export, or an empty folder",
            todo="Choose another folder with --output.", where=str(folder),
        )  # fmt: skip
    return names | {MANIFEST, LAB_LOCK}


def _names_of(data: Any) -> set[str] | None:
    """Plain file names that a manifest of ours lists; None for a manifest of somebody else."""
    if not isinstance(data, dict) or not str(data.get("name", "")).startswith("neaptide-"):
        return None
    return {name for name in data["files"] if name == Path(name).name}
