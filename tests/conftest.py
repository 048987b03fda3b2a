"""Settings of the whole suite."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

from problems import reference_engine

# The judge's convolutions are tiny: more threads only get into each other's way.
torch.set_num_threads(1)

# The same examples every time, so that a red test is red again; HYPOTHESIS_PROFILE=search looks for new ones.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture
def by_reference():
    """The reference engine computes, in this test."""
    with reference_engine():
        yield


@pytest.fixture(scope="module")
def all_by_reference():
    """The reference engine computes, in all tests of the file."""
    with reference_engine():
        yield
