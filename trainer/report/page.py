"""The report, section by section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from shared.lesson import MAX_TRUNCATED_SHARE
from trainer.curve import accuracies
from trainer.report.charts import Series, bar_chart, line_chart, short, values_of
from trainer.report.markup import Content, Html, table, tag
from trainer.report.record import RunRecord, decoder
from trainer.report.samples import again_section, group_section, select

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_FATES = {
    "trained": "bore loss",
    "zero_variance": "all rewards of the group were the same, so none is better than another",
    "singleton": "the only scored sample of its group",
    "reward_error": "the reward gave no verdict",
    "reward_timeout": "the reward gave no verdict in time",
    "truncated": "cut off at max_tokens, which the objective leaves out",
    "overflowed": "its step's gradients were too large for float16, so no update was made",
    "aborted": "cut off by the server",
    "empty": "no token in it",
    "stale": "from weights older than train.max_staleness",
}


def page(record: RunRecord) -> str:
    """The whole document."""
    title = f"{record.path.resolve().name}: training report"
    style = (files("trainer") / "report" / "style.css").read_text(encoding="utf-8")
    head = [
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", title),
        tag("style", Html(style)),
    ]
    sections = [
        _summary(record),
        _curves(record),
        _ledger(record),
        _samples(record),
        _setup(record),
        _figures(record),
    ]
    body = tag("main", tag("h1", title), [section for section in sections if section])
    return "<!doctype html>\n" + tag("html", tag("head", head), tag("body", body), lang="en")


def _section(title: str, note: str, *content: Content) -> Html:
    return tag("section", tag("h2", title, tag("small", note)), *content)


def _summary(record: RunRecord) -> Html:
    metrics, last = record.metrics, record.metrics[-1]
    seconds = sum(
        m.get(part) or 0.0
        for m in metrics
        for part in ("rollout_seconds", "update_seconds", "publish_seconds")
    )
    facts = [
        ("Model", record.setting("model", "path")),
        ("Objective", record.setting("objective", "name")),
        ("Steps", f"{last['step']}"),
        ("Last version", f"v{last['version']}"),
        ("Samples", f"{sum(entry['received_samples'] for entry in record.ledger):,}"),
        ("Completion tokens", f"{sum(entry['received_tokens'] for entry in record.ledger):,}"),
        ("Time in steps", f"{seconds / 60:.1f} min"),
        ("Reward", _first_to_last([m["reward_mean"] for m in metrics])),
        ("Held-out, greedy", _accuracy(record.evaluations)),
    ]
    pairs = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if value]
    return tag("section", tag("dl", pairs, class_="facts"))


def _first_to_last(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{short(known[0])} \N{RIGHTWARDS ARROW} {short(known[-1])}" if known else ""


def _accuracy(evaluations: Sequence[dict[str, Any]]) -> str:
    found = [accuracy for _, accuracy in accuracies(evaluations)]
    return f"{found[0]:.1%} \N{RIGHTWARDS ARROW} {found[-1]:.1%}" if found else ""


def _curves(record: RunRecord) -> Html:
    metrics = record.metrics

    def of(name: str, key: str | None = None, **drawn: Any) -> Series:
        return Series(name, values_of(metrics, key or name), **drawn)

    reward = values_of(metrics, "reward_mean")
    spread = dict(values_of(metrics, "reward_spread"))
    accuracy = accuracies(record.evaluations)
    parts = sorted({name for m in metrics for name in m.get("rewards") or {}})
    charts = [
        line_chart(
            "Reward",
            Series("training samples, and their spread", reward, [spread[s] for s, _ in reward]),
            Series("held-out, greedy", accuracy, dots=True),
        ),
        line_chart(
            "Reward by function",
            *(Series(name, _part(metrics, name)) for name in parts),
        ),
        line_chart(
            "Truncated", of("share of samples", "truncated"), limit=MAX_TRUNCATED_SHARE, floor=0.0
        ),
        line_chart("Useful groups", of("share of groups", "useful_groups"), floor=0.0),
        line_chart(
            "Length in tokens",
            of("all samples", "length"),
            of("those trained", "trained_length"),
            floor=0.0,
        ),
        line_chart(
            "KL in nats per token",
            of("to the sampler", "kl_sampler"),
            of("to the reference", "kl_reference"),
        ),
        line_chart("Clipped", of("share of tokens", "clipped"), of("masked"), floor=0.0),
        line_chart("Gradient norm", of("before clipping", "gradient_norm"), floor=0.0),
        line_chart("Staleness", of("steps, at most", "staleness"), floor=0.0),
        line_chart("Tokens per second", of("of completions", "tokens_per_second"), floor=0.0),
        bar_chart(
            "Seconds of a step",
            {
                "waiting for samples": values_of(metrics, "rollout_seconds"),
                "scoring and training": values_of(metrics, "update_seconds"),
                "publishing": values_of(metrics, "publish_seconds"),
            },
        ),
    ]
    drawn = [chart for chart in charts if chart]
    return _section("Curves", "point at a mark for its value", tag("div", drawn, class_="charts"))


def _part(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    found = [(m["step"], (m.get("rewards") or {}).get(name)) for m in metrics]
    return [(step, float(value)) for step, value in found if value is not None]


def _ledger(record: RunRecord) -> Html | None:
    if not record.ledger:
        return None
    totals: dict[str, Counter[str]] = {}
    for kind in ("groups", "samples", "tokens"):
        totals[kind] = Counter()
        for entry in record.ledger:
            totals[kind].update(entry[kind])
    fates = [fate for fate, _ in totals["samples"].most_common()]
    everything = max(1, sum(totals["samples"].values()))
    rows = [
        [fate.replace("_", " "), f"{totals['groups'][fate]:,}", f"{totals['samples'][fate]:,}",
         f"{totals['samples'][fate] / everything:.1%}", f"{totals['tokens'][fate]:,}",
         _FATES.get(fate, "")]
        for fate in fates
    ]  # fmt: skip
    bars = {
        fate.replace("_", " "): [
            (e["step"], float(e["samples"].get(fate, 0))) for e in record.ledger
        ]
        for fate in fates
    }
    errors: Counter[str] = Counter()
    for entry in record.ledger:
        errors.update(entry.get("reward_errors", {}))
    return _section(
        "Ledger",
        "what became of every sample",
        tag(
            "div",
            bar_chart("Samples of a step", bars),
            table(["Fate", "Groups", "Samples", "Share", "Tokens", "Meaning"], rows),
            class_="beside",
        ),
        [tag("h3", "Rewards without a verdict"), table(["Samples", "Reason"], _reasons(errors))]
        if errors
        else None,
    )


def _reasons(errors: Counter[str]) -> list[list[str]]:
    return [[f"{count:,}", reason] for reason, count in errors.most_common(20)]


def _samples(record: RunRecord) -> Html | None:
    if not record.saved_steps:
        return None
    chosen, decode = select(record.batches()), decoder(record)
    steps = f"of steps {record.saved_steps[0]} to {record.saved_steps[-1]}, whose samples were kept"
    content: list[Content] = []
    for title, groups in (("Best groups", chosen.best), ("Worst groups", chosen.worst)):
        if groups:
            content += [tag("h3", title), [group_section(group, decode) for group in groups]]
    if chosen.again:
        content.append(tag("h3", "The same prompt, step after step"))
        content += [again_section(prompt, times, decode) for prompt, times in chosen.again]
    return _section("Samples", steps, content)


def _setup(record: RunRecord) -> Html | None:
    if not record.config and not record.objective:
        return None
    return _section(
        "What was run",
        "",
        [tag("h3", "Objective"), tag("pre", record.objective)] if record.objective else None,
        [tag("h3", "Resolved configuration"), tag("pre", record.config)] if record.config else None,
    )


def _figures(record: RunRecord) -> Html:
    names = [
        name
        for name in record.metrics[-1]
        if not any(isinstance(m.get(name), dict) for m in record.metrics)
    ]
    rows = [[_figure(m.get(name)) for name in names] for m in record.metrics]
    head = [name.replace("_", " ") for name in names]
    everything = tag("details", tag("summary", "metrics.jsonl as a table"), table(head, rows))
    return _section("All figures", "", everything)


def _figure(value: Any) -> str:
    return short(value) if isinstance(value, int | float | None) else str(value)
