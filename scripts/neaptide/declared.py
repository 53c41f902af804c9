"""The version that a source tree declares."""

from __future__ import annotations

import email
import tomllib


def declared_version(pkg_info: bytes | None, pyproject: bytes | None) -> str:
    """The version that a source tree states: in PKG-INFO, else statically in pyproject.toml; else nothing."""
    if pkg_info is not None:
        return str(email.message_from_bytes(pkg_info).get("Version", ""))
    try:
        project = tomllib.loads((pyproject or b"").decode("utf-8")).get("project", {})
    except ValueError:
        return ""
    return str(project.get("version", ""))
