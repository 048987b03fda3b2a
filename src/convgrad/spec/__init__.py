"""The operations as data, and the way from a call to a Problem."""

from .bind import Binding, Description, bind
from .check import check_attributes, check_dtypes, check_input_count, lookup
from .problem import Problem
from .table import ALL_OPS, BIAS_OPS, OPS, RULES, Arg, Attr, Op, Rule

__all__ = [
    "ALL_OPS",
    "BIAS_OPS",
    "OPS",
    "RULES",
    "Arg",
    "Attr",
    "Binding",
    "Description",
    "Op",
    "Problem",
    "Rule",
    "bind",
    "check_attributes",
    "check_dtypes",
    "check_input_count",
    "lookup",
]
