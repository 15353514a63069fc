"""Every setting of a run, typed and strict. Imports neither torch nor vLLM.

Names that end in `_seconds`, `_gb` or `_tokens` carry that unit. Defaults are the paper's (arXiv 2505.15034,
Section 4 and Appendix D) where it states one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from tango_hpc.base.config.hooks import AdvantagesConfig, CorrectionConfig, LossConfig
from tango_hpc.base.config.roles import (
    OWN_MODEL,
    SAME_MODEL,
    ModelConfig,
    OptimizerConfig,
    RoleConfig,
    SharedRoleConfig,
    VerifierConfig,
    fill_from_generator,
    kind_of_section,
    refuse_keys_of,
)
from tango_hpc.base.config.tasks import TaskConfig
from tango_hpc.base.config.trouble import TroubleConfig
from tango_hpc.base.config.values import (
    Count,
    FilePath,
    NonNegative,
    Positive,
    PositiveFloat,
    ProductDtype,
    Section,
    Share,
    Temperature,
    TemperatureOrGreedy,
)
from tango_hpc.base.types import AlphaSchedule, ClassWeighting, TrackerName


class RunConfig(Section):
    """The place of a run."""

    dir: FilePath = Field(description="Run directory; made if missing, refused if it holds another run.")
    trackers: tuple[TrackerName, ...] = Field(
        ("tensorboard",),
        description="Who else gets the scalars of metrics.jsonl, into the run directory; none needs a network.",
    )
    record_diff: bool = Field(
        True, description="Keep uncommitted changes of the code in a file that only you can read, secrets masked."
    )


class StepLabelsConfig(Section):
    """Labels of steps by trying: the generator goes on from the end of each step of some judged solutions."""

    rule: Literal["success", "change"] = Field(
        "success",
        description=(
            "success: a step is right where some continuation is right; change: wrong where the share of right ones "
            "falls by more than max_fall, or was 0 and stays 0."
        ),
    )
    continuations: Positive = Field(4, description="From the end of each step.")
    solutions: Positive = Field(8, description="Solutions of a verifier step whose steps are labelled.")
    weight: NonNegative = Field(
        0.0, description="Of the share of judgements that agree with the labels, added to Eq. 8; 0: a metric only."
    )
    max_fall: Share = Field(0.0, description="Of change.")


class AlgorithmConfig(Section):
    """Rewards, advantages and loss (Eq. 1 to 9)."""

    advantages: AdvantagesConfig = AdvantagesConfig()
    alpha_start: Share = Field(0.1, description="First weight of step advantages (Eq. 7); paper: 0.5 for REINFORCE++.")
    alpha_end: Share = Field(1e-3, description="Last weight of the step advantages.")
    alpha_schedule: AlphaSchedule = Field("exponential", description="How alpha gets from its first value to its last.")
    ground_truth_weight: Share = Field(
        1.0, description="Of the right answer in the outcome reward (Eq. 2); the rest is the verifier's verdict."
    )
    generator_format_weight: NonNegative = Field(0.0, description="Added for solutions that keep the form (Eq. 2).")
    class_weights: ClassWeighting = Field(
        "sqrt_inverse", description="s of Eq. 9 by the numbers of right and wrong solutions; the paper: sqrt_inverse."
    )
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig | None = Field(
        CorrectionConfig(), description="Of the policy's term only; null: tokens count as they were sampled."
    )
    kl_coef: NonNegative = Field(0.001, description="Beta of Eq. 1; 0 drops the reference model.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description=(
            "Of the KL term, with r = reference / policy: k1 = -log r (no pull on average), k2 = (log r)^2 / 2, "
            "k3 = r - 1 - log r."
        ),
    )
    entropy_coef: NonNegative = Field(
        0.0, description="Bonus on the entropy of the distribution that is sampled from, in nats per token."
    )
    format_weight: NonNegative = Field(0.8, description="Gamma of Eq. 8.")
    verifier_format: Literal["authors", "graded"] = Field(
        "authors",
        description=(
            "Format reward of Eq. 8. authors: 1, less 0.8 without a verdict, 0.8 for a wrong number of judgements, 0.4"
            " for text between the steps; 0 for anything beside the two elements. graded: each departure takes a small"
            " share."
        ),
    )
    combine_verifications: Literal["vote", "mean"] = Field(
        "vote",
        description=(
            "With several verifications of a solution: vote = the majority's judgement of each step and verdict "
            "(SPARK); mean = the mean of their step advantages and outcome rewards, as in the authors' code."
        ),
    )
    min_verifier_j: Annotated[float, Field(ge=-1.0, lt=1.0)] | None = Field(
        None,
        description=(
            "Step advantages have weight 0 in steps where J of the verdicts (true-positive less false-positive "
            "rate, over this and the four steps before it) is not above this. Null: alpha as scheduled."
        ),
    )
    step_labels: StepLabelsConfig | None = Field(None, description="null: no trying.")
    class_ema_decay: Share = Field(0.8, description="Decay of the moving averages behind the class weights of Eq. 9.")


class ProtocolConfig(Section):
    """The form of solutions, and the part of them that the verifier judges (docs/models.md)."""

    solution: Literal["tagged", "free"] = Field(
        "tagged",
        description=(
            "tagged: the paper's <think><step>…</step></think><answer>…</answer>; free: whatever the model writes, its "
            "steps are the paragraphs."
        ),
    )
    judge: Literal["all", "answer"] = Field(
        "all",
        description=(
            "Of a free solution that begins with a thought (<think>…</think>), what the verifier judges: all, or the "
            "text after the thought."
        ),
    )
    max_steps: Positive = Field(24, description="Most steps of a free solution; where there are more, they are joined.")


TAGGED = ProtocolConfig()  # the paper's


class TrainConfig(Section):
    """Algorithm 1: how many steps of what."""

    generator_steps: Positive = 200
    verifier_warmup_steps: Count = Field(40, description="Verifier steps before the first generator step.")
    generator_steps_per_cycle: Positive = Field(3, description="N_g.")
    verifier_steps_per_cycle: Count = Field(1, description="N_v; 0 keeps the verifier as the warm-up left it.")
    questions_per_step: Positive = 256
    rollouts_per_question: Annotated[int, Field(ge=2)] = Field(5, description="M, for both roles.")
    verifications_per_solution: Positive = Field(
        1, description="Verifications of each solution in a generator step (algorithm.combine_verifications)."
    )
    verifier_draws: Positive = Field(
        1,
        description=(
            "Draws of questions of a verifier step, until right and wrong solutions can be judged in equal "
            "numbers; of what was drawn the most balanced choice is judged. 1: the solutions as they come."
        ),
    )
    majority_share: Share | None = Field(
        None,
        description=(
            "Questions without an answer take that of a majority of their solutions, if it has this share of the votes "
            "at least; ties and smaller ones teach nobody. null: every question needs an answer."
        ),
    )
    verified_majority: bool = Field(
        False, description="Only solutions that the verifier calls correct have a vote (majority_share)."
    )
    on_trouble: TroubleConfig = TroubleConfig()
    max_rollbacks: Count = Field(3, description="How often on_trouble may go back in a run before it stops.")
    verifier_learning_rate_scale: PositiveFloat = Field(
        1.0, description="Where one model takes both roles: learning rate of verifier steps over generator steps."
    )
    joint: bool = Field(
        False,
        description=(
            "Where one model takes both roles: generator steps train on judgements as well, in the same updates, and "
            "verifier steps are those of the warm-up alone."
        ),
    )
    joint_solutions: Positive | None = Field(
        None, description="Solutions of a step that are judged M times for a joint update; null: questions_per_step."
    )
    joint_weight: PositiveFloat = Field(
        1.0, description="Of the judgements' loss in a joint update; the solutions' is 1."
    )
    updates_per_batch: Positive = Field(
        1, description="Optimizer updates on each batch; the clip of Eq. 1 acts from the second on."
    )
    eval_every: Count = Field(
        20, description="Greedy evaluation every so many generator steps, and at the end; 0: first and last only."
    )
    dump_every: Count = Field(
        10, description="Write the rollouts of a role's first, every so many-th and last step to Parquet; 0: never."
    )
    trace_steps: tuple[Positive, ...] = Field(
        (),
        description="Optimizer steps to write a trace of (RUN/traces, for Perfetto); profiling slows these steps down.",
    )
    products: ProductDtype = Field(
        "float32", description="As sft.products, of the trainer; the engine multiplies in launch.dtype all the same."
    )
    max_logprob_gap: PositiveFloat | None = Field(
        0.05,
        description=(
            "End the run when the mean gap of engine and trainer log-probabilities exceeds this, in nats; a note "
            "comes from half of it on; null never does. Others see 0.01 to 0.02 in bf16 with models of 4B to 8B."
        ),
    )

    @property
    def num_joint_solutions(self) -> int:
        """`joint_solutions`, resolved."""
        return self.joint_solutions or self.questions_per_step


class DataConfig(Section):
    """Parquet files of questions: columns id, question, answer, source."""

    train: FilePath
    eval: FilePath
    eval_questions: Positive = Field(256, description="Questions of `eval` that the evaluation in the loop asks.")


class SftRoleConfig(Section):
    """Supervised fine-tuning of one role on a Parquet file (question, solution_text[, verification_text])."""

    data: FilePath
    output: FilePath = Field(description="Hugging Face folder that is written.")
    init: ModelConfig = Field(description="What to fine-tune.")
    steps: Positive = 800
    batch_size: Positive = 64
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6, schedule="cosine", warmup_ratio=0.1)
    eval_every: Count = 100
    shuffle: bool = Field(True, description="Draw the rows in random order; false: in the file's, for a curriculum.")
    eval_rows: Positive = Field(256, description="Rows kept out of training for the evaluation loss.")


class SharedSftConfig(Section):
    """The verifier's rows where one model takes both roles; they are spread among the generator's."""

    same_as: Literal["generator"] = Field(description="The role that has the model.")
    data: FilePath = Field(description="In a batch each kind has the share that its rows have in the files.")

    @model_validator(mode="before")
    @classmethod
    def _has_no_model(cls, given: Any) -> Any:
        refuse_keys_of(SftRoleConfig, cls, given)
        return given


class SftConfig(Section):
    """The roles that are fine-tuned first; the paper fine-tunes the generator only."""

    generator: SftRoleConfig | None = None
    verifier: (
        Annotated[
            Annotated[SftRoleConfig, Tag(OWN_MODEL)] | Annotated[SharedSftConfig, Tag(SAME_MODEL)],
            Discriminator(kind_of_section),
        ]
        | None
    ) = Field(None, description="Of a model of its own, or more rows for the generator's (same_as).")
    products: ProductDtype = Field(
        "float32",
        description=(
            "What layers with float32 weights multiply in on a CPU; auto: bfloat16 where that is faster (AMX, or "
            "AVX512-BF16 on an AMD CPU), float32 elsewhere."
        ),
    )

    @property
    def models(self) -> dict[str, SftRoleConfig]:
        """The models that are fine-tuned, each by its first role."""
        both = {"generator": self.generator, "verifier": self.verifier}
        return {name: role for name, role in both.items() if isinstance(role, SftRoleConfig)}

    def data_of(self, model: str) -> dict[str, Path]:
        """Return the files of a model's rows, by the role that they are of."""
        files = {model: self.models[model].data}
        if isinstance(self.verifier, SharedSftConfig):
            files["verifier"] = self.verifier.data
        return files


BenchmarkName = Literal[
    "math500",
    "aime24",
    "aime25",
    "amc23",
    "olympiadbench",
    "gsm8k",
    "boardgameqa",
    "cruxeval",
    "strategyqa",
    "strategyqa_plain",
    "tablebench",
    "processbench",
    "task",
]


class EvalConfig(Section):
    """`tango eval`: benchmarks, decoding, and which weights. Greedy pass@1 is always measured."""

    benchmarks: tuple[BenchmarkName, ...] = Field(
        (
            "math500",
            "aime24",
            "aime25",
            "amc23",
            "olympiadbench",
            "boardgameqa",
            "cruxeval",
            "strategyqa",
            "tablebench",
        ),
        description="Which sets, in this order; processbench asks the verifier, task the questions of data.eval.",
    )
    data: FilePath = Field(Path("data/eval"), description="Folder of the prepared files NAME.parquet.")
    max_questions: Positive | None = Field(
        None, description="Only so many questions of each set, evenly spaced in its file."
    )
    checkpoints_of: FilePath | None = Field(
        None,
        description=(
            "Run whose checkpoints are evaluated; null: this run's own if it has any, else the models as they are."
        ),
    )
    checkpoints: Literal["last", "all"] = Field("last", description="Which checkpoints of that run.")
    use_verifier: bool = Field(True, description="Judge all answers with the verifier, if there is one.")
    samples: Count = Field(0, description="Samples per question: pass@k, majority vote, best of n by the verifier.")
    temperature: Temperature = Field(1.0, description="Of the samples; 0.01 or more.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(1.0, description="Of the samples.")
    verifier_samples: Positive = Field(
        1, description="Verifications of each sample: 1 is greedy, more are sampled and averaged."
    )


class TeacherConfig(Section):
    """`tango teacher`: the model of `generator` writes solutions to fine-tune on; those that are right are kept."""

    questions: FilePath = Field(description="Prepared questions: columns id, question, answer, source.")
    output: FilePath = Field(description="Folder: train.parquet, test.parquet, and parts/ while it is being made.")
    temperature: TemperatureOrGreedy = Field(0.1, description="0 is greedy; else 0.01 or more.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    samples: Positive = Field(1, description="Attempts at each question; the first that is right is kept.")
    test_rows: Count | None = Field(
        None,
        description="Solutions set apart in test.parquet, at most half; 500 if neither this nor test_share is given.",
    )
    test_share: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="Share of the solutions to set apart instead; the paper's authors take 0.1."
    )
    chunk_questions: Positive = Field(1024, description="Questions between two saves.")
    max_questions: Positive | None = Field(None, description="Only the first so many questions.")
    num_shards: Positive = Field(1, description="Jobs that share the questions, as the tasks of an array.")
    shard: Count = Field(0, description="Which of them this is, from 0.")

    @property
    def parts(self) -> Path:
        """Return where the chunks of this shard lie that are done."""
        return self.output / f"parts/{self.shard:04d}_of_{self.num_shards:04d}"


class ReshardConfig(Section):
    """Weight sync from trainer to engine."""

    bucket_mb: PositiveFloat = Field(256.0, description="Size of one bucket; at most two are alive.")
    verify: Literal["always", "first", "never"] = Field(
        "first", description="When to compare checksums of trainer and engine shards."
    )
    timeout_seconds: PositiveFloat = 900.0


class CheckpointConfig(Section):
    """The checkpoints of a run."""

    every_steps: Count = Field(20, description="Save every so many steps; 0: only at the end and when told to stop.")
    keep: Positive = Field(2, description="Whole checkpoints kept, from which a run can go on.")
    keep_weights: Count = Field(
        0, description="Training steps before those, whose weights alone are kept for `tango eval` and `tango export`."
    )
    background: bool | None = Field(
        None,
        description=(
            "Train on while a copy of the state is written. null: where the machine's memory has room for the "
            "copy, by the plan. A stop and the end wait for it."
        ),
    )


# Libraries and models may come from storage that is slow.
STARTUP_SECONDS = 600.0


class LaunchConfig(Section):
    """Ranks: one per GPU, or per share of the CPU cores. Each has a process for every role."""

    nodes: Positive = 1
    tasks_per_node: Positive = 1
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16",
        description=(
            "Of weights and activations; the optimizer's are float32 always. A CPU without bfloat16 instructions "
            "(no avx512_bf16 or amx_bf16 in lscpu) is up to four times as fast in float32."
        ),
    )
    peak_tflops: PositiveFloat | None = Field(
        None,
        description=(
            "Most operations a second of a rank, in 10^12, of which speed/mfu is the share; null: as a matrix "
            "product is measured at the start."
        ),
    )
    threads_per_rank: Positive | None = Field(
        None,
        description=(
            "CPU threads of each rank; null: 1 with device cpu, with cuda 8, or its share of the node's cores "
            "where that is less."
        ),
    )
    collective_timeout_seconds: PositiveFloat = Field(
        2400.0,
        description=(
            "A collective that takes longer fails the run; above hang_timeout_seconds, so that the rank that hangs "
            "is named before those that wait for it give up."
        ),
    )
    hang_timeout_seconds: PositiveFloat = Field(
        1800.0, description="A rank without progress for this long ends the run, named."
    )
    loading_timeout_seconds: PositiveFloat | None = Field(
        None,
        description=(
            "The same until its first step, while it loads libraries and models; null: `hang_timeout_seconds`, "
            "but 600 at least."
        ),
    )
    grace_seconds: PositiveFloat = Field(60.0, description="How long before the time limit a run saves and stops.")
    max_attempts_without_progress: Positive = Field(
        2, description="Starts from the same checkpoint, or results, before a job is given up."
    )
    stopped_exit_code: Literal[0, 85] = Field(
        0,
        description=(
            "Exit code of a batch job that saved and ended on request: 0 is COMPLETED to Slurm, and lets an "
            "`afterok` job start; 85 is FAILED."
        ),
    )

    @property
    def loading_limit_seconds(self) -> float:
        """Return how long a rank may take without progress before its first safe point."""
        return self.loading_timeout_seconds or max(self.hang_timeout_seconds, STARTUP_SECONDS)


class Config(Section):
    """A whole run: both roles, all stages."""

    seed: Count = 0
    run: RunConfig
    task: TaskConfig
    data: DataConfig
    generator: RoleConfig
    verifier: VerifierConfig | None = Field(
        None,
        description=(
            "A model of its own, or the generator's (same_as). Null: outcome rewards only (vanilla GRPO, RLOO, "
            "REINFORCE++)."
        ),
    )
    protocol: ProtocolConfig = TAGGED
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig = SftConfig()
    eval: EvalConfig = Field(default_factory=EvalConfig)  # its folder is seen from where the config is read
    teacher: TeacherConfig | None = None
    reshard: ReshardConfig = ReshardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        verifier, generator = (
            given.get(name) if isinstance(given, dict) else None for name in ("verifier", "generator")
        )
        if isinstance(verifier, dict) and isinstance(generator, dict) and "same_as" in verifier:
            return given | {"verifier": fill_from_generator(verifier, generator)}
        return given

    @property
    def world_size(self) -> int:
        """Ranks of the whole run."""
        return self.launch.nodes * self.launch.tasks_per_node

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """The roles that take part, by name."""
        verifier = self.verifier
        if isinstance(verifier, SharedRoleConfig):
            verifier = verifier.with_model(self.generator)
        return {"generator": self.generator} | ({} if verifier is None else {"verifier": verifier})

    @property
    def is_one_model(self) -> bool:
        """Return whether one model takes both roles."""
        return isinstance(self.verifier, SharedRoleConfig)

    @property
    def models(self) -> dict[str, RoleConfig]:
        """The models, each by the first role that it takes: as its trainer and its engine have to be.

        Of a model in both roles the one with the longer sequences decides on lengths, and one that learns is enough.
        """
        if not self.is_one_model:
            return self.roles
        both = self.roles.values()
        longest = max(both, key=lambda role: role.longest)
        decided = {name: getattr(longest, name) for name in ("max_prompt_tokens", "max_response_tokens")}
        trainable = any(role.trainable for role in both)
        return {"generator": self.generator.model_copy(update=decided | {"trainable": trainable})}

    def model_of(self, role: str) -> str:
        """Return the name of the model that takes `role`."""
        return "generator" if self.is_one_model else role

    def roles_of(self, model: str) -> list[str]:
        """Return the roles that a model takes."""
        return [role for role in self.roles if self.model_of(role) == model]
