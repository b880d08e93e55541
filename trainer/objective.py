"""What is optimized: every choice of the loss in one record that can be printed.

    print(Objective.named("dapo", beta=0.01).formula())

Presets follow the papers named beside them; any field of a preset can be overridden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trainer.advantages import STD_EPS, Baseline, Normalise, Scale
from trainer.kl import Kl
from trainer.mismatch import Correction

Surrogate = Literal["ppo", "gspo", "cispo", "reinforce"]
Reduction = Literal["grpo", "dapo", "dr_grpo"]
Truncated = Literal["keep", "mask", "punish"]

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath (2402.03300); its KL term is off unless beta is set.
    "grpo": {"reduction": "grpo"},
    # DAPO (2503.14476): one mean over all tokens of the step, more room upwards.
    "dapo": {"reduction": "dapo", "clip_high": 0.28},
    # "Understanding R1-Zero-Like Training" (2503.20783); needs constant_length.
    "dr_grpo": {"reduction": "dr_grpo", "scale": "none"},
    # GSPO (2507.18071): the ratio of a sequence moves little, hence the narrow clip.
    "gspo": {"surrogate": "gspo", "reduction": "grpo", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax-M1 (2506.13585), with the bound that ScaleRL (2510.13786) and TRL use: ratio <= 5.
    "cispo": {"surrogate": "cispo", "reduction": "dapo", "clip_low": None, "clip_high": 4.0},
    # The same weight bounded on both sides of 1, as in verl, slime and NeMo-RL.
    "cispo_two_sided": {"surrogate": "cispo", "reduction": "dapo", "clip_high": 0.28},
    # "Mastering Complex Control in MOBA Games" (1912.09729), with verl's cap.
    "dual_clip": {"reduction": "dapo", "dual_clip": 3.0},
    # "Back to Basics" (2402.14740): mean over sequences of the sum over their tokens.
    "rloo": {
        "surrogate": "reinforce",
        "baseline": "leave_one_out",
        "scale": "none",
        "reduction": "dr_grpo",
        "constant_length": 1,
        "clip_low": None,
        "clip_high": None,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss, resolved. Construction fails with every contradiction it finds.

    Attributes:
        surrogate: per-token loss. ``ppo``: clipped ratio; ``gspo``: the same with the sequence's
            geometric mean ratio; ``cispo``: clipped ratio as a constant weight on the
            log-probability; ``reinforce``: the log-probability alone.
        clip_low, clip_high: the ratio is clipped to ``[1 - clip_low, 1 + clip_high]``; None leaves
            that side open. TRL's absolute CISPO bound M is ``clip_low=None, clip_high=M-1``.
        dual_clip: cap c > 1 + clip_high on the ratio where the advantage is negative; verl's
            ``clip_ratio_c`` and, in this range, TRL's ``delta``. None is off.
        beta: coefficient of the KL to the reference, per nat; 0 needs no reference.
        kl: estimator of that KL, see ``trainer.kl``; its ratio is the token's, even for ``gspo``.
            ``k1_reward`` is a cost in the reward, the others are terms of the loss.
        reduction: weights of the tokens, see ``trainer.grpo.token_weights``.
        constant_length: tokens by which ``dr_grpo`` divides each sequence.
        baseline, scale: see ``trainer.advantages.group_advantages``.
        rewards: name and weight of each reward whose sum is R.
        normalise: ``sum`` makes advantages of R; ``each`` makes them of each reward by itself and
            weighs those, see ``trainer.advantages.decoupled_advantages``.
        truncated: what becomes of samples that were cut off at max_tokens. ``keep``: trained like
            others; ``mask``: scored as peers of their group, and then out of the loss and its
            denominator; ``punish``: DAPO's soft punishment is added to R for all that come close.
        overlong: of ``punish``: tokens up to which an answer may go, how many of the last of them
            are punished, and the punishment of the very last, see
            ``trainer.rewards.functions.overlong_penalty``.
        correction: for the sampler/trainer mismatch, see ``trainer.mismatch``. It weighs the
            surrogate, not the KL. Any but ``none`` makes the trainer recompute ``old``.
        correction_low, correction_high: its band; None leaves that side open.
    """

    surrogate: Surrogate = "ppo"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None
    beta: float = 0.0
    kl: Kl = "k3_ratio"
    reduction: Reduction = "dapo"
    constant_length: int | None = None
    baseline: Baseline = "mean"
    scale: Scale = "group_std"
    rewards: tuple[tuple[str, float], ...] = (("R", 1.0),)
    normalise: Normalise = "sum"
    truncated: Truncated = "keep"
    overlong: tuple[int, int, float] | None = None
    correction: Correction = "none"
    correction_low: float | None = None
    correction_high: float | None = None

    @classmethod
    def named(cls, name: str, **overrides: Any) -> Objective:
        """The preset ``name`` with some fields replaced."""
        if name not in PRESETS:
            raise ValueError(f"no objective {name!r}; there are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    def __post_init__(self) -> None:
        problems = [*self._unknown_names()]
        if not problems:
            problems = [message for holds, message in self._rules() if not holds]
        if problems:
            raise ValueError("\n  ".join(["contradictory objective:", *problems]))

    def _unknown_names(self) -> Iterator[str]:
        choices = {"surrogate": Surrogate, "kl": Kl, "reduction": Reduction, "baseline": Baseline,
                   "scale": Scale, "normalise": Normalise, "truncated": Truncated,
                   "correction": Correction}  # fmt: skip
        for field, literal in choices.items():
            if getattr(self, field) not in get_args(literal):
                allowed = ", ".join(get_args(literal))
                yield f"{field}={getattr(self, field)!r} is none of {allowed}"

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """What must hold, each with what to say when it does not."""
        yield from self._clip_rules()
        yield from self._kl_rules()
        yield from self._reduction_rules()
        yield from self._advantage_rules()
        yield from self._truncation_rules()
        yield from self._correction_rules()

    def _clip_rules(self) -> Iterator[tuple[bool, str]]:
        low, high = self.clip_low, self.clip_high
        yield low is None or 0 < low < 1, f"clip_low={low} must be between 0 and 1, or None"
        yield high is None or 0 < high < math.inf, f"clip_high={high} must be positive, or None"
        if self.surrogate == "reinforce":
            yield low is high is None, "reinforce has no ratio: clip_low and clip_high must be None"
        if self.dual_clip is not None:
            yield self.surrogate == "ppo", f"dual_clip has no meaning for {self.surrogate}"
            above = high is not None and 1 + high < self.dual_clip < math.inf
            yield above, f"dual_clip={self.dual_clip} must exceed 1 + clip_high"

    def _kl_rules(self) -> Iterator[tuple[bool, str]]:
        yield 0 <= self.beta < math.inf, f"beta={self.beta} must be finite and not negative"
        useless = self.beta > 0 and self.kl == "k1"
        yield not useless, "k1 in a loss has zero expected gradient: k3_ratio or k1_reward"

    def _reduction_rules(self) -> Iterator[tuple[bool, str]]:
        length = self.constant_length
        if self.reduction == "dr_grpo":
            positive = length is not None and length > 0
            yield positive, "reduction='dr_grpo' needs a positive constant_length"
        else:
            yield length is None, f"reduction={self.reduction!r} does not read constant_length"

    def _advantage_rules(self) -> Iterator[tuple[bool, str]]:
        twice = self.baseline == "leave_one_out" and self.scale == "group_std"
        yield not twice, (
            "leave_one_out keeps a sample's reward out of its baseline and group_std brings it "
            "back: use scale='none' or 'batch_std'"
        )  # fmt: skip

        weights = [weight for _, weight in self.rewards]
        yield any(weights) and all(map(math.isfinite, weights)), f"reward weights are {weights}"
        several = self.normalise == "sum" or len(self.rewards) > 1
        yield several, "normalise='each' needs several rewards"

    def _truncation_rules(self) -> Iterator[tuple[bool, str]]:
        if self.truncated != "punish":
            yield self.overlong is None, f"truncated={self.truncated!r} punishes nothing"
            return
        yield self.normalise == "sum", (
            "truncated='punish' changes the sum of the rewards: with normalise='each' list a "
            "length_penalty reward instead"
        )  # fmt: skip
        if self.overlong is None:
            yield False, "truncated='punish' needs overlong_cache"
            return
        max_tokens, cache, weight = self.overlong
        yield 0 < cache <= max_tokens, f"overlong_cache={cache} must be 1 to {max_tokens} tokens"
        yield 0 < weight < math.inf, f"overlong_weight={weight} must be positive"

    def _correction_rules(self) -> Iterator[tuple[bool, str]]:
        low, high = self.correction_low, self.correction_high
        if self.correction == "none":
            yield low is high is None, "a correction band needs a correction"
            return
        yield low is None or 0 < low < 1, f"correction_low={low} must be between 0 and 1, or None"
        finite = high is None or 1 <= high < math.inf
        yield finite, f"correction_high={high} must be at least 1, or None"
        if self.correction.endswith("truncate"):
            yield high is not None, f"{self.correction} needs correction_high"
            yield low is None, f"{self.correction} has no lower end: correction_low must be None"
        else:
            yield not (low is high is None), f"{self.correction} needs a band"

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Lowest and highest ratio that the clip lets pass."""
        low = 0.0 if self.clip_low is None else 1 - self.clip_low
        return low, math.inf if self.clip_high is None else 1 + self.clip_high

    @property
    def correction_band(self) -> tuple[float, float]:
        """Lowest and highest mismatch weight that is kept."""
        high = math.inf if self.correction_high is None else self.correction_high
        return self.correction_low or 0.0, high

    def formula(self) -> str:
        """The resolved loss as text, with its denominator and everything that goes into it."""
        lines = {"loss": f"sum over tokens of w * ({self._token_loss()})", "w": self._weight()}
        lines |= self._advantage()
        if self.surrogate == "gspo":
            lines["s"] = "exp(mean over the sequence of log pi - log old)"
        if self.surrogate in ("ppo", "cispo") or (self.beta > 0 and self.kl == "k3_ratio"):
            lines["r"] = "pi / old"
        if self.beta > 0 and self.kl.startswith("k3"):
            towards = ", which pulls like KL(ref || pi)" if self.kl == "k3_forward" else ""
            lines["k3"] = f"ref / pi - 1 - log(ref / pi){towards}"
        if self.correction != "none":
            low, high = self.correction_band
            lines["c"] = (
                f"{self.correction} of old / sampler, [{low:g}, {high:g}], without gradient"
            )
        if any(" old" in line or "/ old" in line for line in lines.values()):
            lines["old"] = "the sampler's" if self.correction == "none" else "pi before the update"
        lines["step"] = f"samples of groups whose rewards differ{self._left_out()}"
        return "\n".join(f"{name:<4} = {text}" for name, text in lines.items())

    def _left_out(self) -> str:
        return ", but for those cut off at max_tokens" if self.truncated == "mask" else ""

    def _token_loss(self) -> str:
        ratio = "s" if self.surrogate == "gspo" else "r"
        low, high = self.clip_bounds
        clipped = f"clip({ratio}, {low:g}, {high:g})"
        surrogate = f"min({ratio} A, {clipped} A)"
        if self.dual_clip is not None:
            surrogate = f"(A < 0 ? max({surrogate}, {self.dual_clip:g} A) : {surrogate})"
        elif self.surrogate == "cispo":
            surrogate = f"stop_gradient({clipped}) A log pi"
        elif self.surrogate == "reinforce":
            surrogate = "A log pi"
        weight = "" if self.correction == "none" else "c "
        in_loss = self.beta > 0 and self.kl != "k1_reward"
        penalty = f" + {self.beta:g} {self._kl_text()}" if in_loss else ""
        return f"-{weight}{surrogate}{penalty}"

    def _kl_text(self) -> str:
        return {
            "k2": "(log pi - log ref)^2 / 2",
            "k3_forward": "k3(pi, ref)",
            "k3_ratio": "r k3(pi, ref)",
        }[self.kl]

    def _weight(self) -> str:
        return {
            "grpo": "1 / (sequences of the step * tokens of the sequence)",
            "dapo": "1 / (tokens of the step)",
            "dr_grpo": f"1 / (sequences of the step * {self.constant_length})",
        }[self.reduction]

    def _advantage(self) -> dict[str, str]:
        baseline = {"mean": "group mean", "leave_one_out": "mean of the others in the group"}
        spread = {"group_std": "group std", "batch_std": "batch std"}.get(self.scale)
        name = "R" if self.normalise == "sum" else "R_k"
        centred = f"{name} - {baseline[self.baseline]}"
        advantage = centred if spread is None else f"({centred}) / ({spread} + {STD_EPS:g})"
        cost = ""
        if self.beta > 0 and self.kl == "k1_reward":
            cost = f" - {self.beta:g} (log old - log ref)"
        if self.normalise == "sum":
            reward = self._reward()
            return {"A": advantage + cost} | ({} if reward == "R" else {"R": reward})
        total = " + ".join(f"{weight:g} A_{name}" for name, weight in self.rewards)
        return {"A": f"({total}) / (batch std of that + {STD_EPS:g}){cost}", "A_k": advantage}

    def _reward(self) -> str:
        parts = [name if weight == 1 else f"{weight:g} {name}" for name, weight in self.rewards]
        if self.overlong:
            max_tokens, cache, weight = self.overlong
            start = max_tokens - cache
            parts.append(f"{weight:g} min(max(({start} - length) / {cache}, -1), 0)")
        return " + ".join(parts)
