"""Packs a directory of the host into the archive that a sandbox unpacks."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from libra_jax import config, protocols

_BLOCK = 512


def pack(directory: Path, most_mib: int) -> bytes:
    """Returns a tar of the directory's files, folders and symbolic links. Links are stored as links, not followed.

    Args:
      directory: A directory of the host.
      most_mib: Largest size of the archive in MiB.

    Raises:
      ConfigError: The path is not a directory, or its archive would be larger than `most_mib`.
    """
    if not directory.is_dir():
        raise protocols.ConfigError(f"the workspace {directory} is no directory of this host; name one that is")
    room, content = most_mib * 2**20, io.BytesIO()

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isfile() or member.isdir() or member.issym()):
            return None  # a socket or a device cannot be copied as a file
        nonlocal room
        # Each member takes a header block besides its content, so empty files count too.
        room -= member.size + _BLOCK
        config.check(room >= 0, "sandbox.workspace_mib", f"{most_mib} do not hold the workspace {directory}; raise it")
        # The host's users mean nothing inside the sandbox, and names would leak who owns the files.
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.dereference = False
        archive.add(directory, arcname=".", filter=kept)
    return content.getvalue()
