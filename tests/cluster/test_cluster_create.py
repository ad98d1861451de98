"""Which cluster a config gets, and that Ray is not imported before it is asked for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from libra_jax.cluster import create, inprocess
from libra_jax.config import ClusterConfig
from libra_jax.protocols import ConfigError


def test_the_default_is_the_embedded_cluster():
    assert isinstance(create.create(ClusterConfig()), inprocess.InProcessCluster)


def test_ray_that_is_not_installed_is_said_with_the_field_and_the_remedy(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    with pytest.raises(ConfigError, match=r"config\.cluster\.backend.*pip install ray"):
        create.create(ClusterConfig(backend="ray"))


def test_the_embedded_cluster_imports_no_ray():
    script = (
        "import sys; from libra_jax.cluster import create; from libra_jax.config import ClusterConfig; "
        "create.create(ClusterConfig()); sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
