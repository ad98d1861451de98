"""A directory of the host as the archive that a sandbox unpacks."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from libra_jax import config, protocols

_BLOCK = 512


def pack(directory: Path, most_mib: int) -> bytes:
    """The directory's files, folders and symbolic links, which are kept as they are and not followed.

    Args:
      directory: of the host.
      most_mib: MiB that it may take.

    Raises:
      ConfigError: it is none, or takes more.
    """
    if not directory.is_dir():
        raise protocols.ConfigError(f"the workspace {directory} is no directory of this host; name one that is")
    room, content = most_mib * 2**20, io.BytesIO()

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isfile() or member.isdir() or member.issym()):
            return None  # a socket or a device is nothing to copy
        nonlocal room
        room -= member.size + _BLOCK
        config.check(room >= 0, "sandbox.workspace_mib", f"{most_mib} do not hold the workspace {directory}; raise it")
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.dereference = False
        archive.add(directory, arcname=".", filter=kept)
    return content.getvalue()
