"""How products of f32 are taken on a GPU is what the user says last."""

from __future__ import annotations

import pytest

import convgrad
from convgrad import SpecError, precision
from convgrad.gpu import backend


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(precision, "_chosen", "")
    monkeypatch.delenv("CONVGRAD_F32", raising=False)


def test_the_default():
    assert convgrad.get_float32_precision() == "default"


@pytest.mark.parametrize("word", precision.PRECISIONS)
def test_words(word, monkeypatch):
    monkeypatch.setenv("CONVGRAD_F32", word)
    assert convgrad.get_float32_precision() == word
    convgrad.set_float32_precision("ieee")
    assert convgrad.get_float32_precision() == "ieee", "a call goes before the environment"
    convgrad.set_float32_precision(word)
    assert backend.setting() == word, "another setting, another plan"


@pytest.mark.parametrize("word", ["highest", "TF32", "", None, 32])
def test_other_words(word, monkeypatch):
    with pytest.raises(SpecError, match="set_float32_precision: precision must be one of 'default', 'ieee', 'tf32'"):
        convgrad.set_float32_precision(word)
    monkeypatch.setenv("CONVGRAD_F32", "fast")
    with pytest.raises(SpecError, match=r"CONVGRAD_F32 must be one of .*, got 'fast'"):
        convgrad.get_float32_precision()
