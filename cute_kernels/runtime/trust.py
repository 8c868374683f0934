"""Decides whether files in a directory may be loaded as code: only if other users could not have put them there.

A library that a process loads can do anything with that process's rights. So a kernel cache or a bundle is used only if
nobody can write it except its user, root, and the user who installed this package.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrust(path: Path) -> str | None:
    """Returns why nothing may be loaded from a file or directory, as a text for people; None if it may be loaded.
    Raises OSError if the path does not exist.

    A trusted file belongs to the process's user, to root, or to the owner of this package. Only the owner, the user's
    own group and root's group may write to it. The same holds for all directories above it, except those with the
    sticky bit, such as /tmp.
    """
    path = path.resolve()
    status = path.stat()
    trusted = {0, os.geteuid(), Path(__file__).stat().st_uid}
    if status.st_uid not in trusted:
        return f"{path} belongs to user {status.st_uid}, not to {os.geteuid()} or root"
    for place in (path, *path.parents):
        status = place.stat()
        if place != path and status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"{place} can be written by everybody (mode {stat.S_IMODE(status.st_mode):04o})"
        if status.st_mode & stat.S_IWGRP and status.st_gid not in (0, os.getegid()):
            return f"{place} can be written by group {status.st_gid} (mode {stat.S_IMODE(status.st_mode):04o})"
    return None
