from __future__ import annotations

import pytest
from graph_files import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the graph files of `graph_files`."""
    root = tmp_path_factory.mktemp("graph")
    write_all(root)
    return root
