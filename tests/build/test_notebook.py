"""docs/notebooks/quickstart.ipynb runs in a kernel, as it is, with real vLLM; its cell shows the reward's curve."""

import os
import pathlib
import re
import shutil

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_trains_and_shows_the_rewards_curve(tmp_path, monkeypatch):
    shutil.copy(ROOT / "docs/notebooks/quickstart.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / "quickstart.ipynb", as_version=4)
    first, second = (cell for cell in notebook.cells if cell.cell_type == "code")
    assert len([line for line in first.source.splitlines() if line.strip()]) <= 15
    # Enough to see that it trains.
    for whole, part in (("steps=10", "steps=2"), ("group_size = 64, 8", "group_size = 16, 8")):
        assert whole in first.source
        first.source = first.source.replace(whole, part)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.text for output in first.outputs if output.output_type == "stream")
    rewards = [float(value) for value in re.findall(r"\d: ([\d.]+)", printed.splitlines()[-1])]
    assert len(rewards) == 2
    assert min(rewards) > 0.2, "the warm start leaves the policy right in a third of its attempts"
    assert any("image/png" in output.get("data", {}) for output in first.outputs), "the curve"
    assert "1: " in "".join(output.text for output in second.outputs if output.output_type == "stream")
