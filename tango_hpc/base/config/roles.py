"""Settings of one role: its model, trainer, optimizer and engine. Units and defaults as in `schema.py`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from tango_hpc.base.config.paths import NO_TEMPLATE_FILE, absolute
from tango_hpc.base.config.values import FilePath, NonNegative, Positive, PositiveFloat, Section, Share, Temperature
from tango_hpc.base.tiny_language import LETTERS, TAGS


def _template(value: str) -> str:
    return value if value in NO_TEMPLATE_FILE else str(absolute(Path(value)))


def _characters(characters: str) -> str:
    if len(set(characters)) < len(characters) or set(characters) & set(TAGS):
        named = " ".join(tag for tag in TAGS if len(tag) == 1)
        raise ValueError(f"must be different characters, none of them a token anyway ({named} and blank)")
    return characters


class TinyModelConfig(Section):
    """A model with random weights and a tokenizer of its own, built where `model.path` does not exist yet."""

    family: Literal["qwen2", "qwen3", "llama"] = "qwen2"
    hidden_size: Positive = 192
    intermediate_size: Positive = 512
    num_layers: Positive = 4
    num_heads: Positive = 6
    num_kv_heads: Positive = 2
    tie_embeddings: bool = True
    characters: Annotated[str, AfterValidator(_characters)] = Field(
        LETTERS, description="What its tokenizer knows besides the tags of the formats, one token each."
    )
    max_position: Positive = Field(512, description="Longest sequence, prompt and response together, in tokens.")


class ModelConfig(Section):
    """The weights that a role starts from."""

    path: FilePath = Field(description="Hugging Face folder: config.json, safetensors, tokenizer.")
    build: TinyModelConfig | None = Field(
        None, description="Have fine-tuning build a tiny model at `path` if the folder does not exist."
    )
    reference_path: FilePath | None = Field(
        None, description="Weights of the frozen reference of the KL term; default: those of `path`."
    )


class ParallelConfig(Section):
    """The split of a role's trainer. Data parallelism is what is left: world size / (tensor * pipeline)."""

    tensor: Positive = 1
    pipeline: Positive = 1
    sequence: bool = Field(
        False,
        description=(
            "Tensor ranks share out the tokens wherever they would all hold the same (norms, residuals), to save "
            "memory; needs tensor > 1."
        ),
    )


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: PositiveFloat = 1e-6
    schedule: Literal["constant", "cosine", "exponential"] = "constant"
    warmup_ratio: Share = Field(0.0, description="Share of the steps over which the rate rises linearly from 0.")
    final_ratio: Share = Field(0.1, description="Last learning rate over first, for cosine and exponential.")
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.0
    clip_grad_norm: PositiveFloat = 1.0


class RolloutConfig(Section):
    """A role's vLLM engine. Data parallelism of its rollouts is world size / tensor."""

    tensor: Positive = 1
    max_num_seqs: Positive | None = Field(
        None,
        description=(
            "Sequences that an engine takes at once; null: its share of the responses of a step or an evaluation, "
            "as far as its cache holds them at half the allowed length, at most 512 (vLLM's largest CUDA graph) and "
            "max_batched_tokens."
        ),
    )
    max_batched_tokens: Positive = 8192
    kv_cache_gb: PositiveFloat | None = Field(None, description="KV cache of a rank; required on a CPU.")
    gpu_memory_utilization: Share | None = Field(
        None,
        description=(
            "Share of the GPU in use while the engine generates, with what all processes keep there; null: 0.88."
        ),
    )
    enforce_eager: bool = Field(False, description="Skip CUDA graphs: slower decoding, quicker start.")


class AdapterConfig(Section):
    """Low-rank adapters, which are trained in place of the weights. Names and meaning are those of PEFT's `LoraConfig`.

    A weight is W0 + scale * B A, with W0 from the model and scale alpha / rank, or alpha / sqrt(rank) with
    `use_rslora`.
    """

    rank: Positive = Field(32, description="Rows of A and columns of B; PEFT's `r`.")
    alpha: PositiveFloat = Field(64.0, description="Numerator of the scale; PEFT's `lora_alpha`.")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="The linear layers with an adapter by their Hugging Face name, such as [q_proj, v_proj].",
    )
    use_rslora: bool = Field(False, description="Scale by the square root of the rank.")
    path: FilePath | None = Field(
        None, description="Folder of an adapter, as PEFT writes it, to start from; null: A random and B zero."
    )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class ModelSettings(Section):
    """A model, and how it is trained and run."""

    model: ModelConfig
    adapter: AdapterConfig | None = Field(
        None, description="Train low-rank adapters (docs/adapters.md) and not the weights; null: all weights."
    )
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    micro_batch_tokens: Positive = Field(16384, description="Most tokens of one packed micro-batch, prompts included.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description=(
            "What is computed again in the backward pass to save memory: nothing; norms and the activation "
            "function, which cost little; or each whole layer, a third more work."
        ),
    )


class RoleSettings(Section):
    """A role: how a model is asked, and whether it learns from what it answers."""

    trainable: bool = Field(True, description="False: nothing is learned from this role's responses (Section 4.3).")
    max_prompt_tokens: Positive = 1024
    max_response_tokens: Positive = 2048
    temperature: Temperature = Field(1.0, description="Of the rollouts; 0.01 or more.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description=(
            "Strings that end a response, beside the tokenizer's ends of turn. The tokens up to the one that "
            "completes the string are the response, and are trained on."
        ),
    )
    prompt: FilePath | None = Field(
        None, description="File with this role's prompt (docs/data.md); null: the shipped one."
    )
    chat_template: Annotated[str, AfterValidator(_template)] = Field(
        "auto", description="auto: the tokenizer's, where it has one; none: plain prompts; or the path of a Jinja file."
    )
    chat_template_arguments: dict[str, Any] = Field(
        {},
        description="Passed to the chat template, such as {enable_thinking: false} for Qwen3 (no and off are words).",
    )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and response together."""
        return self.max_prompt_tokens + self.max_response_tokens


class RoleConfig(RoleSettings, ModelSettings):
    """A role with a model of its own."""


class SharedRoleConfig(RoleSettings):
    """A role that the generator's model takes as well. What is not given is as the generator has it, but for `prompt`
    and `trainable`.
    """

    same_as: Literal["generator"] = Field(description="The role that has the model (docs/one_model.md).")

    @model_validator(mode="before")
    @classmethod
    def _has_no_model(cls, given: Any) -> Any:
        refuse_keys_of(RoleConfig, cls, given)
        return given

    def with_model(self, generator: RoleConfig) -> RoleConfig:
        """Return the settings of the role and of the generator's model."""
        return generator.model_copy(update={name: getattr(self, name) for name in RoleSettings.model_fields})


def fill_from_generator(verifier: dict[str, Any], generator: dict[str, Any]) -> dict[str, Any]:
    """Return the section of a verifier that is the generator's model, with what is not given as the generator has
    it.
    """
    inherited = RoleSettings.model_fields.keys() - {"prompt", "trainable"}
    return {name: value for name, value in generator.items() if name in inherited} | verifier


def refuse_keys_of(own: type[Section], shared: type[Section], given: Any) -> None:
    """Raise ValueError where a section with `same_as` has settings that only one with a model of its own can have."""
    others = own.model_fields.keys() - shared.model_fields.keys()
    if isinstance(given, dict) and (refused := [name for name in given if name in others]):
        raise ValueError(
            f"{', '.join(refused)} cannot stand beside same_as, since the generator's hold for the model; leave out one"
            " or the other"
        )


OWN_MODEL, SAME_MODEL = "own model", "same model"  # tags of the two kinds of a verifier's sections


def kind_of_section(given: Any) -> str:
    """Return which of the two kinds of sections is given."""
    is_shared = "same_as" in given if isinstance(given, dict) else hasattr(given, "same_as")
    return SAME_MODEL if is_shared else OWN_MODEL


VerifierConfig = Annotated[
    Annotated[RoleConfig, Tag(OWN_MODEL)] | Annotated[SharedRoleConfig, Tag(SAME_MODEL)],
    Discriminator(kind_of_section),
]
