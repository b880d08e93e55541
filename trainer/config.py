"""The whole configuration of a training run: one typed, frozen object.

Its sections are the classes below; :mod:`trainer.config_file` reads them from TOML and the command
line. Keys that do not exist and settings that contradict each other are refused. Paths are relative
to the working directory.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.protocol import MAX_GROUP_SIZE, MAX_PROMPTS
from trainer.arithmetic import SHORT_QUESTION
from trainer.objective import PRESETS, Objective

Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
DType = Literal["float32", "bfloat16", "float16"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """The model that is trained."""

    path: str = Field(min_length=1, description="Checkpoint directory or name.")
    dtype: DType = Field(
        default="float32",
        description="Of the weights that AdamW updates. In bfloat16 small updates round away.",
    )
    device: str = Field(default="auto", description="auto takes a GPU when there is one.")


class ServerConfig(_Section):
    """The rollout server."""

    url: str = Field(default="http://127.0.0.1:8300", pattern=r"^https?://\S+$")
    token_env: str = Field(
        default="TITO_TOKEN",
        description="Environment variable that holds the bearer token, if any.",
    )
    timeout: float = Field(
        default=600.0, gt=0, description="Seconds without a byte before giving up."
    )
    ready_timeout: float = Field(
        default=300.0, ge=0, description="Seconds to wait for it at the start."
    )
    publish_dtype: DType = Field(
        default="bfloat16", description="What weights are cast to for sending."
    )


class ArithmeticConfig(_Section):
    """Options of the built-in problems."""

    max_operand: int = Field(default=50, ge=9)
    operations: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-"), min_length=1)
    question: str = Field(default=SHORT_QUESTION, description="With {a}, {op} and {b}.")

    @model_validator(mode="after")
    def _has_places(self) -> Self:
        try:
            self.question.format(a=1, op="+", b=2)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"question may name {{a}}, {{op}} and {{b}} alone: {error}") from None
        return self


class DataConfig(_Section):
    """Prompts and reference answers."""

    source: Literal["arithmetic", "jsonl", "dataset"] = Field(
        default="arithmetic", description="dataset is a Hugging Face dataset saved to disk."
    )
    path: str | None = Field(default=None, description="The JSONL file or the dataset's directory.")
    split: str | None = Field(
        default=None, description="Which split, when the dataset has several."
    )
    prompt_field: str = Field(
        default="prompt", description="Column with a string or chat messages."
    )
    answer_field: str = Field(
        default="answer", description="Column with the reference; empty: none."
    )
    chat: bool = Field(
        default=True, description="Send strings as a user's message, not as plain text."
    )
    template: str = Field(default="{prompt}", description="Wording around a string prompt.")
    system: str = Field(default="", description="A system message before every chat; empty: none.")
    shuffle: bool = Field(default=True, description="Reshuffle the rows in every epoch.")
    arithmetic: ArithmeticConfig = ArithmeticConfig()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.source == "arithmetic") != (self.path is None):
            raise ValueError(f"source {self.source!r} with path {self.path!r}: a path goes with "
                             f"jsonl and dataset, and only with them")  # fmt: skip
        if self.split is not None and self.source != "dataset":
            raise ValueError(f"split {self.split!r}: only source 'dataset' has splits")
        if "{prompt}" not in self.template:
            raise ValueError("template lacks {prompt}, so every prompt would be the same")
        if self.system and not self.chat:
            raise ValueError("a system message needs chat = true")
        return self


class RolloutConfig(_Section):
    """What is asked of the server in each step."""

    prompts_per_step: int = Field(default=32, ge=1, le=MAX_PROMPTS)
    group_size: int = Field(
        default=8, ge=2, le=MAX_GROUP_SIZE, description="One has no peers to beat."
    )
    max_tokens: Count = 512
    temperature: float = Field(
        default=1.0, gt=0.0, le=100.0, description="Greedy samples cannot train."
    )
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def sampling(self) -> dict[str, Any]:
        """The fields of a rollout request that say how one completion is drawn."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class RewardConfig(_Section):
    """How samples are scored."""

    function: str = Field(
        default="numeric", min_length=1, description="numeric, exact, or path/to/file.py:function."
    )


class ObjectiveConfig(_Section):
    """The loss: a preset, of which any of the keys after ``name`` replaces a part.

    What each means is said in :class:`trainer.objective.Objective`.
    """

    name: str = Field(default="grpo", description="grpo, dapo, dr_grpo, gspo, cispo or rloo.")
    surrogate: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    beta: float | None = Field(default=None, description="Above 0 a frozen reference is loaded.")
    kl: str | None = None
    reduction: str | None = None
    constant_length: Count | None = Field(
        default=None, description="Of dr_grpo; unset: rollout.max_tokens."
    )
    baseline: str | None = None
    scale: str | None = None

    def resolve(self, max_tokens: int) -> Objective:
        """The objective that these keys stand for.

        Args:
            max_tokens: what ``dr_grpo`` divides by when no ``constant_length`` is set.

        Raises:
            ValueError: a name is unknown, or settings contradict each other.
        """
        changes: dict[str, Any] = self.model_dump(exclude={"name"}, exclude_none=True)
        reduction = changes.get("reduction", PRESETS.get(self.name, {}).get("reduction"))
        if reduction == "dr_grpo" and "constant_length" not in PRESETS.get(self.name, {}):
            changes.setdefault("constant_length", max_tokens)
        return Objective.named(self.name, **changes)


class OptimizerConfig(_Section):
    """AdamW and its schedule: linear warm-up, then constant."""

    lr: float = Field(
        default=1e-6, ge=0.0, description="0 changes nothing, which proves a loop honest."
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    warmup_updates: CountOrNone = 0
    max_gradient_norm: float = Field(default=1.0, gt=0.0)


class TrainConfig(_Section):
    """The loop."""

    output: str = Field(
        default="runs/train", min_length=1, description="Directory for all that is kept."
    )
    steps: Count = 100
    updates_per_rollout: Count = Field(
        default=1, description="Passes of the optimizer over one rollout."
    )
    micro_batch_tokens: Count = Field(
        default=16384, description="Padded tokens in one forward pass. Results do not depend on it."
    )
    seed: int = 0
    checkpoint_every: CountOrNone = Field(default=50, description="Steps; 0: at the end alone.")
    keep_checkpoints: Count = 2


class EvaluationConfig(_Section):
    """Accuracy on held-out problems, before, after and in between."""

    every: CountOrNone = Field(default=0, description="Steps; 0: before and after alone.")
    prompts: CountOrNone = Field(default=64, description="Held-out problems; 0 evaluates nothing.")
    samples: CountOrNone = Field(
        default=0, description="Sampled answers for each, beside a greedy one."
    )
    max_tokens: CountOrNone = Field(default=0, description="0: as in training.")
    path: str | None = Field(default=None, description="Held-out rows, for jsonl and dataset.")
    split: str | None = None


class Config(_Section):
    """Everything that defines a run."""

    model: ModelConfig
    server: ServerConfig = ServerConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.objective.resolve(self.rollout.max_tokens)
        evaluation, arithmetic = self.evaluation, self.data.source == "arithmetic"
        if arithmetic and evaluation.path is not None:
            raise ValueError("evaluation.path: arithmetic has held-out problems of its own")
        if not arithmetic and evaluation.prompts and evaluation.path is None:
            raise ValueError("evaluation.path is missing; or set evaluation.prompts to 0")
        if (evaluation.every or evaluation.samples) and not evaluation.prompts:
            raise ValueError("evaluation.every and .samples need evaluation.prompts above 0")
        if evaluation.split is not None and self.data.source != "dataset":
            raise ValueError("evaluation.split: only source 'dataset' has splits")
        if self.rollout.chat_template_kwargs and not (arithmetic or self.data.chat):
            raise ValueError("rollout.chat_template_kwargs has no effect with data.chat = false")
        return self
