"""Built-in arithmetic problems: an endless, addressable stream with a held-out split.

    python -m trainer.arithmetic        # print a few problems of each split

Problem ``i`` of a stream is a pure function of its options and ``i``, so a trainer resumes
from one saved integer. Whether a problem is held out depends on its operands alone: no seed
or stream position can bring a held-out problem, or its mirror image, into training.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]

SHORT_QUESTION = "{a}{op}{b}=?"
PLAIN_QUESTION = "What is {a} {op} {b}? Answer with just the number."

HELD_OUT_ONE_IN = 10

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


@dataclass(frozen=True)
class Problem:
    """``a op b``, the chat that asks for it and the reference answer."""

    a: int
    op: str
    b: int
    question: str = SHORT_QUESTION

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat that asks for it."""
        text = self.question.format(a=self.a, op=self.op, b=self.b)
        return [{"role": "user", "content": text}]

    @property
    def answer(self) -> str:
        """The right one."""
        return str(_OPERATIONS[self.op](self.a, self.b))


@dataclass(frozen=True)
class ArithmeticStream:
    """Endless problems over operands ``0..max_operand``; ``stream[i]`` may be read in any order."""

    split: Split = "train"
    seed: int = 0
    max_operand: int = 50
    operations: tuple[str, ...] = ("+", "-")
    question: str = SHORT_QUESTION

    def __post_init__(self) -> None:
        unknown = set(self.operations) - set(_OPERATIONS)
        if unknown or not self.operations:
            raise ValueError(f"operations must be some of {list(_OPERATIONS)}: {self.operations}")
        # Below this a split could be empty, and the search for a problem would never end.
        if self.max_operand < 9:
            raise ValueError(f"max_operand must be at least 9: {self.max_operand}")

    def __getitem__(self, index: int) -> Problem:
        if index < 0:
            raise IndexError(f"the stream starts at 0: {index}")
        draw = random.Random(f"arithmetic:{self.seed}:{index}")
        while True:
            a, b = draw.randint(0, self.max_operand), draw.randint(0, self.max_operand)
            op = draw.choice(self.operations)
            if split_of(a, op, b) == self.split:
                return Problem(a, op, b, self.question)

    def batch(self, start: int, count: int) -> list[Problem]:
        """Problems ``start .. start + count - 1``."""
        return [self[index] for index in range(start, start + count)]

    def distinct(self, count: int) -> list[Problem]:
        """The first ``count`` problems without repeats: what an evaluation should use."""
        possible = len(self.operations) * (self.max_operand + 1) ** 2 // HELD_OUT_ONE_IN
        # The draws are random, so collecting nearly every problem would take ever longer.
        if count > possible * 3 // 4:
            raise ValueError(f"{count} distinct problems are too many for about {possible}")
        found: dict[Problem, None] = {}
        index = 0
        while len(found) < count:
            found.setdefault(self[index])
            index += 1
        return list(found)


def split_of(a: int, op: str, b: int) -> Split:
    """Which split ``a op b`` belongs to, the same for ``b op a``."""
    # 3+4 in training would give 4+3 away, so both orders share one hash. hashlib rather than
    # hash(), which differs from process to process.
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low}{op}{high}".encode()).digest()
    held_out = int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0
    return "held_out" if held_out else "train"


def main() -> None:
    """Print some problems of each split."""
    splits: tuple[Split, ...] = ("train", "held_out")
    for split in splits:
        for problem in ArithmeticStream(split).distinct(5):
            print(f"{split:>8}  {problem.messages[0]['content']}  ->  {problem.answer}")


if __name__ == "__main__":
    main()
