"""The registry: what is asked for a plan, and what each algorithm must bring along."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from convgrad.backend import Refusal
from convgrad.cpu import telling
from convgrad.cpu.plan import registry
from convgrad.spec.problem import Problem

from .problems import targets

PROBLEM = Problem.parse("y f32 n1 g1 cx4 cy4 x9 w3 y9 s1 d1 p1")


def test_every_nest_is_told():
    assert {row.nest for row in registry.ALGORITHMS} == set(telling.TELL)


def test_an_algorithm_is_asked_only_for_its_own_name(monkeypatch: pytest.MonkeyPatch):
    asked = []
    fast = SimpleNamespace(plan=lambda problem, target, threads: asked.append(problem.algorithm))
    row = registry.Algorithm("fast", "a nest", "fast.plan", "fast.kernel")
    module = registry._module
    monkeypatch.setattr(registry, "_module", lambda name: fast if name == row.planner else module(name))
    monkeypatch.setattr(registry, "ALGORITHMS", (row, *registry.ALGORITHMS))
    target = targets()["native"]
    assert registry.make_plan(PROBLEM, target, 2).nest == "gather"
    assert not asked
    found = registry.make_plan(replace(PROBLEM, algorithm="fast"), target, 2)
    assert asked
    assert isinstance(found, Refusal)
    assert "'fast'" in found.reason
