"""Charts as SVG: a value for each step, drawn once, with the numbers in tooltips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.report.markup import Html, tag

WIDTH, HEIGHT = 520, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 10, 10, 24

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        points: ``(step, value)``.
        band: half widths around the line, one for each point.
        dots: draw points alone, of a thing that is measured now and then.
    """

    name: str
    points: Points
    band: Sequence[float] = ()
    dots: bool = False


class _Plane:
    """Where steps and values lie."""

    def __init__(self, steps: Sequence[float], low: float, high: float) -> None:
        self.first, self.last = min(steps), max(steps)
        self.low, self.high = low, high if high > low else low + 1.0

    def x(self, step: float) -> float:
        span = max(self.last - self.first, 1)
        return _LEFT + (step - self.first) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> list[Html]:
        """Three lines with their values, and the first and last step."""
        drawn = []
        for value in (self.low, (self.low + self.high) / 2, self.high):
            y = self.y(value)
            drawn.append(_line("grid", _LEFT, y, WIDTH - _RIGHT, y))
            drawn.append(_label(_LEFT - 6, y + 3.5, short(value), "end"))
        drawn.append(_label(_LEFT, HEIGHT - 6, f"step {self.first:g}", "start"))
        drawn.append(_label(WIDTH - _RIGHT, HEIGHT - 6, f"{self.last:g}", "end"))
        return drawn


def values_of(records: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """``(step, value)`` of the records that have the value."""
    found = [(record["step"], record.get(key)) for record in records]
    return [(step, float(value)) for step, value in found if value is not None]


def line_chart(
    title: str, *series: Series, limit: float | None = None, floor: float | None = None
) -> Html | None:
    """Lines over steps; None if there is nothing to draw.

    Args:
        limit: a level that is marked.
        floor: where the axis begins, if not at the lowest value.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    values = [value for one in drawn for _, value in one.points]
    ends = [v + w for one in drawn for (_, v), w in zip(one.points, one.band, strict=False)]
    low = min(values) if floor is None else floor
    plane = _Plane(
        [step for one in drawn for step, _ in one.points],
        low,
        max([*values, *ends, *([] if limit is None else [limit * 1.2])]),
    )
    marks = plane.axes()
    if limit is not None:
        y = plane.y(limit)
        marks += [
            _line("limit", _LEFT, y, WIDTH - _RIGHT, y),
            _label(_LEFT + 4, y - 4, short(limit)),
        ]
    for number, one in enumerate(drawn):
        marks += _drawn(one, plane, number)
    return _figure(title, [(one.name, n) for n, one in enumerate(drawn)], marks, _told(drawn))


def bar_chart(title: str, parts: Mapping[str, Points]) -> Html | None:
    """Bars of parts that stand on each other, one for each step; None if there are none."""
    parts = {name: points for name, points in parts.items() if any(v for _, v in points)}
    if not parts:
        return None
    totals: dict[float, float] = {}
    for points in parts.values():
        for step, value in points:
            totals[step] = totals.get(step, 0.0) + value
    plane = _Plane([min(totals) - 0.5, max(totals) + 0.5], 0.0, max(totals.values()))
    width = max(1.0, (WIDTH - _LEFT - _RIGHT) / (plane.last - plane.first) * 0.8)
    marks, below = plane.axes()[:-2], dict.fromkeys(totals, 0.0)
    for number, (name, points) in enumerate(parts.items()):
        for step, value in points:
            top, bottom = plane.y(below[step] + value), plane.y(below[step])
            below[step] += value
            marks.append(
                tag("rect", tag("title", f"step {step:g}, {name}: {short(value)}"),
                    class_=f"bar s{number}", x=f"{plane.x(step) - width / 2:.1f}",
                    y=f"{top:.1f}", width=f"{width:.1f}", height=f"{bottom - top:.1f}")
            )  # fmt: skip
    marks.append(_label(_LEFT, HEIGHT - 6, f"step {min(totals):g}", "start"))
    marks.append(_label(WIDTH - _RIGHT, HEIGHT - 6, f"{max(totals):g}", "end"))
    told = ", ".join(f"{name} {short(sum(v for _, v in points))}" for name, points in parts.items())
    return _figure(title, [(name, n) for n, name in enumerate(parts)], marks, f"in all: {told}")


def short(value: float | None) -> str:
    """A number with about three significant digits."""
    if value is None or not math.isfinite(value):
        return "\N{EN DASH}"
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    if size >= 100 or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"


def _drawn(one: Series, plane: _Plane, number: int) -> list[Html]:
    places = [(plane.x(step), plane.y(value)) for step, value in one.points]
    marks = []
    if one.band:
        upper = [plane.y(v + w) for (_, v), w in zip(one.points, one.band, strict=True)]
        lower = [
            plane.y(max(plane.low, v - w)) for (_, v), w in zip(one.points, one.band, strict=True)
        ]
        edge = [(x, y) for (x, _), y in zip(places, upper, strict=True)]
        edge += [(x, y) for (x, _), y in zip(reversed(places), reversed(lower), strict=True)]
        marks.append(tag("path", class_=f"band s{number}", d=f"{_path(edge)}Z"))
    if not one.dots:
        marks.append(tag("path", class_=f"line s{number}", d=_path(places)))
    for (x, y), (step, value) in zip(places, one.points, strict=True):
        told = tag("title", f"step {step:g}, {one.name}: {short(value)}")
        kind = "dot" if one.dots else "spot"
        marks.append(
            tag("circle", told, class_=f"{kind} s{number}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=4)
        )
    return marks


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _told(series: Sequence[Series]) -> str:
    """The chart in words, for those who do not see it."""
    return "; ".join(
        f"{one.name} from {short(one.points[0][1])} to {short(one.points[-1][1])}" for one in series
    )


def _figure(title: str, names: Sequence[tuple[str, int]], marks: list[Html], told: str) -> Html:
    keys = [tag("span", name, class_=f"key s{number}") for name, number in names]
    drawing = tag("svg", marks, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
                  aria_label=f"{title}: {told}")  # fmt: skip
    return tag("figure", tag("figcaption", tag("b", title), keys), drawing)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Html:
    return tag("line", class_=kind, x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}")


def _label(x: float, y: float, content: str, anchor: str = "start") -> Html:
    return tag("text", content, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)
