"""The whole configuration of a training run: one typed, frozen object.

Its sections are the classes below; :mod:`trainer.config_file` reads them from TOML and the command
line. Keys that do not exist and settings that contradict each other are refused. Paths are relative
to the working directory.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.protocol import MAX_GROUP_SIZE, MAX_PROMPTS, MAX_TEMPERATURE, MIN_TEMPERATURE
from trainer.arithmetic import SHORT_QUESTION
from trainer.objective import PRESETS, Objective
from trainer.reward_parts import Part

Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
Bound = float | Literal["off"] | None
DType = Literal["float32", "bfloat16", "float16"]
Url = Annotated[str, Field(pattern=r"^https?://\S+$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraConfig(_Section):
    """A low-rank adapter instead of all weights."""

    rank: CountOrNone = Field(default=0, description="0 trains all weights.")
    alpha: Count = Field(default=32, description="The adapter is scaled by alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        default=(), description="Names of layers; none: every linear layer but the head."
    )


class ModelConfig(_Section):
    """The model that is trained."""

    path: str = Field(min_length=1, description="Checkpoint directory or name.")
    dtype: DType = Field(
        default="float32",
        description="What the model computes in; half precision is faster on a GPU and halves what "
        "is kept for the backward pass. float16 scales the loss so that small gradients do not "
        "become 0, and skips an update whose gradients are too large for it.",
    )
    master_weights: bool = Field(
        default=True,
        description="When dtype is half precision: the optimizer updates float32 copies of the "
        "trained weights, with float32 gradients and moments, and the model computes with the "
        "copies rounded. AdamW takes 18 bytes for each weight then, and 16 when dtype is float32. "
        "Without copies it takes 8, and most steps of a small learning rate round away.",
    )
    device: str = Field(default="auto", description="auto takes a GPU when there is one.")
    head_dtype: Literal["weights", "float32"] = Field(
        default="weights",
        description="What logits are computed in; float32 over bfloat16 weights costs little and "
        "brings trainer and sampler nearer to each other when the sampler does it too.",
    )
    packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Sequences end to end without padding; auto: where the model's attention can.",
    )
    activation_checkpointing: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the activations that are computed again instead of kept: up to 0.5 "
        "those of MLPs, then whole layers (when fused: projections, then attention); true is all "
        "of them.",
    )
    liger: bool | Literal["auto"] = Field(
        default="auto",
        description="Fused kernels for norms, rotary and SwiGLU, of which Liger has two; auto: on "
        "a GPU, where it is installed, knows the model, and layers are neither fused nor compiled.",
    )
    fused_layers: bool | Literal["auto"] = Field(
        default="auto",
        description="Run each decoder layer as one function with a backward pass of its own; auto: "
        "on a GPU and one rank, where sequences are packed and layers known and not compiled; a "
        "run says why not.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the layers with torch, which takes minutes when they first run.",
    )
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _can_be_updated(self) -> Self:
        if self.dtype == "float16" and not self.master_weights:
            raise ValueError(
                "dtype 'float16' needs master_weights: squares of gradients, which AdamW divides "
                "by, are 0 in it"
            )
        return self

    def keeps_masters(self) -> bool:
        """Whether trained weights are float32 though the model computes in half precision."""
        return self.master_weights and self.dtype != "float32"


class ServerConfig(_Section):
    """The rollout server."""

    url: Url = Field(default="http://127.0.0.1:8300", description="Where it listens.")
    urls: tuple[Url, ...] = Field(
        default=(), description="Several servers, which share the work; used instead of url."
    )
    token_env: str = Field(
        default="TITO_TOKEN",
        description="Environment variable that holds the bearer token, if any.",
    )
    timeout: float = Field(
        default=600.0, gt=0, description="Seconds without a byte before giving up."
    )
    ready_timeout: float = Field(
        default=300.0,
        ge=0,
        description="Seconds to wait for one at the start, when all fail, and in eval for room.",
    )
    publish_dtype: DType = Field(
        default="bfloat16", description="What weights are cast to for sending."
    )
    transport: Literal["http", "delta", "ipc", "nccl", "auto"] = Field(
        default="http",
        description="delta sends what has changed, at the price of a copy of the weights for each "
        "server in this process's memory; publish_dtype must be what the servers serve. ipc "
        "copies into the memory of a server of this host, nccl broadcasts to its GPUs. auto takes "
        "the fastest of ipc, nccl and http that works.",
    )
    sleep: Literal[0, 1, 2] = Field(
        default=0,
        description="For a server on the GPU that trains: it sleeps while the trainer steps. 1 "
        "keeps its weights in host memory, 2 drops them, 0 never sleeps.",
    )
    report_rewards: bool = Field(
        default=True, description="Send scores back, for the servers' pages to show."
    )

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("urls names a server twice")
        if self.sleep and len(self.every_url()) > 1:
            raise ValueError("sleep is for the one server that shares the trainer's GPU")
        return self

    def every_url(self) -> tuple[str, ...]:
        """All servers; at least one."""
        return self.urls or (self.url,)


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

    prompts_per_step: int = Field(
        default=32, ge=1, le=MAX_PROMPTS, description="Groups that a step begins with."
    )
    group_size: int = Field(
        default=8, ge=2, le=MAX_GROUP_SIZE, description="One has no peers to beat."
    )
    max_tokens: Count = Field(
        default=512, description="Of a completion. Cut off too early, answers cannot be right."
    )
    temperature: float = Field(
        default=1.0,
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="Greedy samples cannot train.",
    )
    refill_budget: float = Field(
        default=0.0,
        ge=0,
        description="Prompts that may be asked for beyond prompts_per_step, as a share of it, to "
        "replace groups that teach nothing.",
    )
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    seeded: bool = Field(
        default=False,
        description="Draw every group with a seed of its own, which follows from train.seed. With "
        "a server that was started with --deterministic, runs repeat bit by bit.",
    )

    def sampling(self) -> dict[str, Any]:
        """The fields of a rollout request that say how one completion is drawn."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class RewardFunctionConfig(_Section):
    """One of several rewards: a ``[[reward.functions]]`` table."""

    name: str = Field(default="", description="For metrics; empty: as the function is called.")
    function: str = Field(min_length=1, description="As reward.function.")
    weight: float = Field(default=1.0, description="Factor in the sum.")
    options: dict[str, Any] = Field(default_factory=dict, description="As reward.options.")

    def part(self) -> Part:
        """The same as the workers know it."""
        name = self.name or self.function.rpartition(":")[2]
        return Part(name, self.function, self.weight, self.options)


class RewardConfig(_Section):
    """How samples are scored, see :mod:`trainer.rewards`: by one function or by several."""

    function: str | None = Field(
        default=None,
        min_length=1,
        description="numeric (when nothing is said), exact, math, format, regex, length_penalty, "
        "code, http, or path/to/file.py:function.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of every call, or the service's url."
    )
    functions: tuple[RewardFunctionConfig, ...] = Field(
        default=(), description="Instead of function: several, whose weighted sum is maximised."
    )
    workers: Count = Field(default=4, description="Most processes that score at a time.")
    timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds for one sample, or for a batch of a service."
    )
    memory_mb: Count = Field(
        default=2048, description="A worker's, beyond what it holds once the functions are loaded."
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.functions and (self.function or self.options):
            raise ValueError("function and options, or a list of functions, but not both")
        names = [part.name for part in self.parts()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two functions named {', '.join(twice)}: give each a name of its own")
        return self

    def parts(self) -> tuple[Part, ...]:
        """The reward functions, at least one."""
        if self.functions:
            return tuple(function.part() for function in self.functions)
        function = self.function or "numeric"
        return (RewardFunctionConfig(function=function, options=self.options).part(),)


class ObjectiveConfig(_Section):
    """The loss: a preset, of which any of the keys after ``name`` replaces a part.

    What each means is said in :class:`trainer.objective.Objective`.
    """

    name: str = Field(default="grpo", description=f"{', '.join(PRESETS)}.")
    surrogate: str | None = None
    clip_low: Bound = Field(default=None, description="off leaves that side open.")
    clip_high: Bound = None
    dual_clip: Bound = None
    beta: float | None = Field(default=None, description="Above 0 a frozen reference is loaded.")
    kl: str | None = Field(default=None, description="k1_reward, k2, k3_ratio or k3_forward.")
    reduction: str | None = None
    constant_length: Count | None = Field(
        default=None, description="Of dr_grpo; unset: rollout.max_tokens."
    )
    baseline: str | None = Field(default=None, description="mean or leave_one_out.")
    scale: str | None = Field(default=None, description="group_std, batch_std or none.")
    normalise: str | None = Field(
        default=None, description="sum, or each: before rewards are added."
    )
    truncated: str | None = Field(default=None, description="keep, mask or punish.")
    overlong_cache: Count | None = Field(
        default=None, description="Of punish: the last tokens before max_tokens, which cost."
    )
    overlong_weight: float = Field(default=1.0, gt=0, description="Of punish: cost of the last.")
    correction: str | None = Field(
        default=None,
        description="Of the sampler/trainer mismatch: token, sequence or geometric, then _truncate "
        "or _mask; or none.",
    )
    correction_low: Bound = None
    correction_high: Bound = None

    def resolve(
        self, max_tokens: int, rewards: tuple[tuple[str, float], ...] | None = None
    ) -> Objective:
        """The objective that these keys stand for.

        Args:
            max_tokens: what ``dr_grpo`` divides by when no ``constant_length`` is set, and where
                ``punish`` ends.
            rewards: name and weight of each.

        Raises:
            ValueError: a name is unknown, or settings contradict each other.
        """
        apart = {"name", "overlong_cache", "overlong_weight"}
        changes: dict[str, Any] = self.model_dump(exclude=apart, exclude_none=True)
        changes = {name: None if value == "off" else value for name, value in changes.items()}
        reduction = changes.get("reduction", PRESETS.get(self.name, {}).get("reduction"))
        if reduction == "dr_grpo" and "constant_length" not in PRESETS.get(self.name, {}):
            changes.setdefault("constant_length", max_tokens)
        if self.overlong_cache is not None:
            changes["overlong"] = (max_tokens, self.overlong_cache, self.overlong_weight)
        if rewards is not None:
            changes["rewards"] = rewards
        return Objective.named(self.name, **changes)


class OptimizerConfig(_Section):
    """The optimizer and its schedule."""

    name: str = Field(
        default="AdamW",
        description="A class of torch.optim. The betas and eps below are for AdamW alone.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of that class."
    )
    lr: float = Field(
        default=1e-6, ge=0.0, description="0 changes nothing, which proves a loop honest."
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    warmup_updates: CountOrNone = Field(
        default=0, description="Updates in which lr rises to its full size."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="What lr does then: it stays, or falls along a line or half a cosine until the "
        "last update of train.steps. A step without an update is not counted.",
    )
    max_gradient_norm: float = Field(
        default=1.0, gt=0.0, description="Longer gradients are scaled down to this norm."
    )


class TrainConfig(_Section):
    """The loop."""

    output: str = Field(
        default="runs/train", min_length=1, description="Directory for all that is kept."
    )
    steps: Count = Field(default=100, description="Rollouts that are trained on.")
    updates_per_rollout: Count = Field(
        default=1, description="Passes of the optimizer over one rollout."
    )
    micro_batch_tokens: Count = Field(
        default=16384, description="Tokens in one forward pass. Results do not depend on it."
    )
    max_staleness: CountOrNone = Field(
        default=0,
        description="Steps that samples may lag behind what is trained. 0 is strictly on-policy; "
        "above, the servers sample for later steps while the trainer trains.",
    )
    seed: int = Field(default=0, description="Of the data's order and of fresh weights.")
    checkpoint_every: CountOrNone = Field(default=50, description="Steps; 0: at the end alone.")
    keep_checkpoints: Count = 2
    keep_batches: CountOrNone = Field(
        default=100, description="Steps whose samples are kept for replay; 0: none."
    )


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
    right_at: float = Field(
        default=1.0, description="The reward from which an answer counts as right in pass@k."
    )
    answer_pattern: str = Field(
        default="",
        description="Of strict parsing: a regular expression whose one group is the answer, such "
        "as '#### (.*)'; empty: the whole text is the answer.",
    )

    @model_validator(mode="after")
    def _captures_one_answer(self) -> Self:
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            raise ValueError(f"answer_pattern is not a regular expression: {error}") from None
        if self.answer_pattern and groups != 1:
            raise ValueError(f"answer_pattern has {groups} groups; the one is the answer")
        return self


class TrackingConfig(_Section):
    """Where figures go, besides the console, metrics.jsonl and TensorBoard's files."""

    wandb: str = Field(default="", description="Project at Weights & Biases; empty: none.")
    trackio: str = Field(default="", description="Project of Trackio; empty: none.")
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Where Prometheus may scrape /metrics; 0: nowhere."
    )
    metrics_host: str = Field(default="127.0.0.1", description="The address of that port.")


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
    tracking: TrackingConfig = TrackingConfig()

    def resolved_objective(self) -> Objective:
        """The loss, with all that decides it: presets, rewards, lengths."""
        rewards = tuple((part.name, part.weight) for part in self.reward.parts())
        return self.objective.resolve(self.rollout.max_tokens, rewards)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.resolved_objective()
        if self.server.sleep and self.train.max_staleness:
            raise ValueError(
                "server.sleep with train.max_staleness above 0: a server that sleeps while the "
                "trainer steps cannot sample for later steps meanwhile"
            )
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
