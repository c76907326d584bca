"""What CloudWatch's alarms make of recorded metrics: a small evaluator of metric math, after AWS's manual.

Owns the rules that the module's alarms use. Whatever it does not know it refuses to evaluate (`Unknown`), so that no
verdict rests on a part of an expression that was not looked at.

- A series has values at some periods, and none at others. Arithmetic and comparisons have a value where all that they
  combine have one.
- SUM of a list has one where any of the list has one.
- FILL fills the gaps of a series that has a value somewhere in the range; one without any stays empty.
- An alarm is in ALARM where at least M of its last N periods breach; a period without a value is what
  `treat_missing_data` says.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Series = dict[int, float]
"""Values by the number of their period."""

Minutes = Mapping[int, float]
"""What was recorded: values by the minute."""

STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"Maximum": max, "Minimum": min, "Sum": sum}
COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Gt: lambda one, other: one > other,
    ast.LtE: lambda one, other: one <= other,
}
THRESHOLDS: dict[str, Callable[[float, float], bool]] = {
    "GreaterThanThreshold": lambda value, threshold: value > threshold,
    "GreaterThanOrEqualToThreshold": lambda value, threshold: value >= threshold,
}


class Unknown(ValueError):
    """A part of an expression or an alarm that this evaluator knows nothing of."""


@dataclass(frozen=True)
class Alarm:
    """An alarm, as DescribeAlarms describes it."""

    described: Mapping[str, Any]

    def ringing(self, recorded: Mapping[str, Minutes], minutes: int) -> list[int]:
        """Return the minutes at whose end a period ends, and it is in ALARM.

        Args:
            recorded: by the ids of its queries.
            minutes: how long to look.
        """
        (period_s,) = {query["MetricStat"]["Period"] for query in self._metrics}
        period = period_s // 60
        names = {
            query["Id"]: _aggregated(recorded[query["Id"]], period, query["MetricStat"]["Stat"])
            for query in self._metrics
        }
        return [end * period for end in range(1, minutes // period + 1) if self._is_ringing(names, end)]

    @property
    def _metrics(self) -> list[Mapping[str, Any]]:
        return [query for query in self.described["Metrics"] if "MetricStat" in query]

    def _is_ringing(self, names: Mapping[str, Series], end: int) -> bool:
        count = self.described["EvaluationPeriods"]
        looked_at = range(max(0, end - count), end)
        seen = {name: {at: value for at, value in series.items() if at in looked_at} for name, series in names.items()}
        (judged,) = (query["Expression"] for query in self.described["Metrics"] if query.get("ReturnData"))
        series = evaluate(judged, seen, looked_at)
        if isinstance(series, float):
            raise Unknown("an alarm of a number")
        breaches = THRESHOLDS[self.described["ComparisonOperator"]]
        missing = {"notBreaching": False, "breaching": True}[self.described["TreatMissingData"]]
        bad = sum(breaches(series[at], self.described["Threshold"]) if at in series else missing for at in looked_at)
        return bad >= self.described.get("DatapointsToAlarm", count)


def evaluate(expression: str, names: Mapping[str, Series], looked_at: range) -> Series | float:
    """Evaluate metric math for some periods. Raises Unknown."""
    tree = ast.parse(expression.replace(" AND ", " and "), mode="eval")
    return _Evaluation(names, looked_at).of(tree.body)


class _Evaluation:
    def __init__(self, names: Mapping[str, Series], looked_at: range) -> None:
        self._names, self._looked_at = names, looked_at

    def of(self, node: ast.expr) -> Series | float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return float(value)
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
                compare = COMPARISONS[type(operator)]
                return _combined(lambda one, other: float(compare(one, other)), self.of(left), self.of(right))
            case ast.BoolOp(op=ast.And(), values=[left, right]):
                return _combined(lambda one, other: float(bool(one and other)), self.of(left), self.of(right))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return _combined(lambda one, other: one * other, self.of(left), self.of(right))
            case ast.Call(func=ast.Name(id=function), args=arguments):
                return self._call(function, arguments)
        raise Unknown(ast.unparse(node))

    def _call(self, function: str, arguments: Sequence[ast.expr]) -> Series | float:
        match function, arguments:
            case "SUM", [ast.List(elts=parts)]:
                found: Series = {}
                for part in map(self.of, parts):
                    if isinstance(part, float):
                        raise Unknown("SUM of a number")
                    for at, value in part.items():
                        found[at] = found.get(at, 0.0) + value
                return found
            case "FILL", [series, ast.Constant(value=int() | float() as value)]:
                holey = self.of(series)
                if isinstance(holey, float):
                    raise Unknown("FILL of a number")
                return {at: holey.get(at, float(value)) for at in self._looked_at} if holey else {}
            case "IF", [condition, yes, no]:
                flags, chosen, other = self.of(condition), self.of(yes), self.of(no)
                if isinstance(flags, float):
                    raise Unknown("IF of a number")
                found = {at: chosen if flag else other for at, flag in flags.items()}
                values = {at: part if isinstance(part, float) else part.get(at) for at, part in found.items()}
                return {at: value for at, value in values.items() if value is not None}
        raise Unknown(function)


def _combined(combine: Callable[[float, float], float], one: Series | float, other: Series | float) -> Series | float:
    if isinstance(one, float):
        if isinstance(other, float):
            return combine(one, other)
        return {at: combine(one, value) for at, value in other.items()}
    if isinstance(other, float):
        return {at: combine(value, other) for at, value in one.items()}
    return {at: combine(value, other[at]) for at, value in one.items() if at in other}


def _aggregated(minutes: Minutes, period: int, statistic: str) -> Series:
    values: dict[int, list[float]] = {}
    for minute, value in minutes.items():
        values.setdefault(minute // period, []).append(value)
    return {at: STATISTICS[statistic](found) for at, found in values.items()}
