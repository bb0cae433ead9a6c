"""Under which user a part runs that refuses to be root.

As an ordinary user: as ourselves. As root: inside a user namespace, in which root's own files appear to
belong to an ordinary user, so that no file changes its owner; and where the kernel or the container forbids
that, as an unprivileged user that exists, who then owns the folder.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tickwheel.embedded.errors import FolderUnusable, NoUnprivilegedUser

OVERFLOW_UID = (
    65534  # In a namespace it stands for everybody who is not mapped, so it makes a poor identity there.
)


@dataclass(frozen=True, slots=True)
class Identity:
    """How to start the child: `prefix` stands before its command, `user_id` and `group_id` are given to
    Popen.

    `owner_user_id` and `owner_group_id` must own its folder, as seen from outside.
    """

    prefix: tuple[str, ...]
    user_id: int | None
    group_id: int | None
    owner_user_id: int
    owner_group_id: int


def choose_identity(namespace: bool | None = None) -> Identity:
    """`namespace` forces (True) or forbids (False) a user namespace; None takes one where it works.

    Raises NoUnprivilegedUser.
    """
    if os.geteuid() != 0:
        return Identity((), None, None, os.geteuid(), os.getegid())
    prefix = _namespace_prefix() if namespace is not False else None
    if prefix is not None:
        return Identity(prefix, None, None, 0, os.getegid())
    if namespace:
        raise NoUnprivilegedUser("user namespaces are not allowed here")
    user = _existing_user(("postgres", "nobody"))
    if user is None:
        raise NoUnprivilegedUser("there is no other user here")
    return Identity((), user.pw_uid, user.pw_gid, user.pw_uid, user.pw_gid)


def require_reachable(path: Path, identity: Identity) -> None:
    """Raises FolderUnusable when a parent folder is closed to the identity.

    We open no folder's mode ourselves.
    """
    if identity.user_id is None:
        return
    for parent in reversed(path.parents):
        mode = parent.stat()
        open_to_all = mode.st_mode & 0o001
        open_to_group = mode.st_gid == identity.group_id and mode.st_mode & 0o010
        open_to_owner = mode.st_uid == identity.user_id and mode.st_mode & 0o100
        if not (open_to_all or open_to_group or open_to_owner):
            name = pwd.getpwuid(identity.user_id).pw_name
            raise FolderUnusable(
                path,
                f"Postgres must run as the user {name} here, who may not enter {parent}",
                f"choose a folder that {name} can reach, such as one under /var/lib or /tmp",
            )


def give_to(path: Path, identity: Identity) -> None:
    """Makes the identity the owner of the folder and all that is in it.

    Only root can; others own it already.
    """
    if os.geteuid() != 0 or not path.exists():
        return
    owner, group = identity.owner_user_id, identity.owner_group_id
    if path.lstat().st_uid != owner:
        os.chown(path, owner, group, follow_symlinks=False)
    for folder, folder_names, file_names in os.walk(path):
        for name in (*folder_names, *file_names):
            entry = os.path.join(folder, name)
            if os.lstat(entry).st_uid != owner:
                os.chown(entry, owner, group, follow_symlinks=False)


@cache
def _namespace_prefix() -> tuple[str, ...] | None:
    """The command that enters a user namespace as somebody who exists; None where that does not work."""
    unshare = shutil.which("unshare")
    user = _existing_user(("postgres", "daemon", "bin"))
    if unshare is None or user is None or user.pw_uid == OVERFLOW_UID:
        return None
    prefix = (unshare, "--user", f"--map-user={user.pw_uid}", f"--map-group={user.pw_gid}")
    try:
        probe = subprocess.run(
            [*prefix, "true"], capture_output=True, timeout=5, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return prefix if probe.returncode == 0 else None


def _existing_user(preferred: tuple[str, ...]) -> pwd.struct_passwd | None:
    users = {user.pw_name: user for user in pwd.getpwall() if user.pw_uid != 0}
    for name in preferred:
        if name in users:
            return users[name]
    return min(users.values(), key=lambda user: user.pw_uid, default=None)
