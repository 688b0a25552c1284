"""The notebook in examples/, executed: it starts two engines, trains on them, and plots."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

# By default, an engine gives up if the controller does not answer within 5 s, as on a busy machine.
PATIENT = "c.IPEngine.timeout = 60\n"

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook/two_engines.ipynb"


def test_it_trains_on_two_engines_and_plots(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipyparallel")
    pytest.importorskip("sklearn")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    profile = tmp_path / "ipython/profile_default"
    profile.mkdir(parents=True)
    (profile / "ipengine_config.py").write_text(PATIENT)
    monkeypatch.setenv("IPYTHONDIR", str(profile.parent))
    # Engines are started by the mpiexec of this environment, the kernel by its Python.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=220, kernel_name="python3").execute(cwd=str(tmp_path))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.get("data", {}) for output in outputs]
    (ranks,) = [data["text/plain"] for data in shown if "rank 0 of 2" in data.get("text/plain", "")]
    assert ranks == "['rank 0 of 2: 899 images', 'rank 1 of 2: 898 images']"
    assert any("image/png" in data for data in shown)
    assert "True\n" in [output["text"] for output in outputs if output.get("name") == "stdout"]
