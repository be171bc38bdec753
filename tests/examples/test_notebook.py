"""The notebook runs from its first cell to its last."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "fedaccord.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_its_results(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises where a cell does
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = [str([output.get("data", output) for output in cell.outputs]) for cell in cells]
    assert ["image/png" in text for text in texts] == [True, False, False, True, False, False]
    for word, text in zip(
        ("afedpd", "drift", "0.weight", "fading prox", "fedinit", "'0', '1'"), texts, strict=True
    ):
        assert word in text
        assert "INFO" not in text


def test_the_notebook_is_stored_without_outputs() -> None:
    """A reader sees the results of the installed version."""
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
