"""Launches that begin before the ones before them end: which do, and that they wait."""

from __future__ import annotations

import re

import pytest

from convgrad.gpu.plan import registry
from convgrad.gpu.plan.chains import WAITING, chained
from convgrad.gpu.plan.records import Plan
from convgrad.gpu.target import of_kind
from convgrad.spec import Problem
from marks import slow_but

COPIED = "{} bf16 n16 g1 cx64 cy96 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1"


def launches(wanted, kind="sm_90"):
    plan = registry.make_plan(Problem.parse(COPIED.format(wanted)), of_kind(kind))
    assert isinstance(plan, Plan), plan
    return plan.launches


def test_copies_and_sums_follow_each_other():
    """The first launch comes after what the stream did before; copies of what is given wait at their end alone."""
    first, *others = launches("x")
    assert not first.early
    assert first.constant("ORDER") == "first"
    assert all(launch.early for launch in others)
    orders = [launch.constant("ORDER") for launch in others if launch.kernel == "relay"]
    assert orders == ["beside", "after"]
    assert others[-1].constant("ORDER") == "after", "the result is copied when it is there"
    kernels = [launch.kernel for launch in launches("w")]
    assert kernels == ["relay", "relay", "weights_boxes", "finish_weights"]


def test_gathers_in_tf32_begin_when_weights_are_packed():
    problem = Problem.parse("x f32 n32 g1 cx128 cy128 x28x28 w3x3 y28x28 s1x1 d1x1 p1x1 x@nxc y@nxc w@xio")
    for precision, early in (("tf32", False), ("bf16x6", True)):
        plan = registry.make_plan(problem, of_kind("sm_90"), precision)
        assert isinstance(plan, Plan), plan
        *_, pack, gather = plan.launches
        assert (pack.kernel, gather.kernel, gather.early) == ("pack", "gather", early)


def test_other_gpus_have_no_such_launches():
    for launch in launches("x", "sm_80"):
        assert not launch.early
        assert launch.kernel != "relay" or launch.constant("ORDER") == "alone"
    single = registry.make_plan(Problem.parse(f"{COPIED.format('x')} x@nxc y@nxc w@xio"), of_kind("sm_90"))
    assert chained(single, of_kind("sm_90")) is single


@pytest.mark.parametrize("wanted", slow_but("", "xw"))
def test_every_program_that_begins_early_waits(wanted):
    """Each waits for the launch before it, without a branch around that; so all that came before is complete."""
    compiler = pytest.importorskip("convgrad.gpu.compile")
    pytest.importorskip("triton")
    for launch in launches(wanted):
        assert launch.kernel == "relay" or launch.kernel in WAITING
        ptx = compiler.build(launch, of_kind("sm_90"), aligned=True).asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) >= launch.early
        if launch.kernel == "relay":
            body = ptx[ptx.index("griddepcontrol.launch_dependents") :]
            words = ("griddepcontrol.wait", r"ld\.global", r"st\.global")
            wait, reads, writes = (re.search(word, body) for word in words)
            at = None if wait is None else wait.start()
            order = launch.constant("ORDER")
            assert (at is None) == (order == "first")
            assert order != "after" or at < reads.start()
            assert order != "beside" or at > writes.start()


@pytest.mark.parametrize("wanted", "yxw")
def test_nothing_to_compute_is_a_plan_too(wanted):
    """Without images there are no launches for y and x, and for w at most those that write zeros."""
    problem = Problem.parse(f"{wanted} bf16 n0 g1 cx64 cy96 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1")
    plan = registry.make_plan(problem, of_kind("sm_90"))
    assert isinstance(plan, Plan), plan
    assert wanted == "w" or not plan.launches
