"""Settings of a part of the method that is a Python file: a shipped one by its name, or one of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from tango_hpc.base.config.paths import absolute
from tango_hpc.base.config.values import Section, of_json

HookKind = Literal["loss", "correction", "generator_advantages", "verifier_advantages"]
_METHOD = Path(__file__).parents[2] / "method"
SHIPPED: dict[HookKind, Path] = {
    "loss": _METHOD / "losses",
    "correction": _METHOD / "corrections",
    "generator_advantages": _METHOD / "advantages/generator",
    "verifier_advantages": _METHOD / "advantages/verifier",
}
# Where the config names the file.
KEYS: dict[HookKind, str] = {
    "loss": "algorithm.loss",
    "correction": "algorithm.correction",
    "generator_advantages": "algorithm.advantages.generator",
    "verifier_advantages": "algorithm.advantages.verifier",
}


def shipped_names(kind: HookKind) -> list[str]:
    """Return the names of the files of this kind that the package has."""
    return sorted(file.stem for file in SHIPPED[kind].glob("[!_]*.py"))


class HookConfig(Section):
    """A file of the method, and what it is called with."""

    kind: ClassVar[HookKind]
    name: str
    settings: Annotated[dict[str, Any], AfterValidator(of_json)] = Field(
        {}, description="Settings that differ from the file's `defaults`."
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name.endswith(".py"):
            return str(absolute(Path(name)))
        if name not in shipped_names(cls.kind):
            names = ", ".join(shipped_names(cls.kind))
            raise ValueError(f"must be {names} or the path of a Python file that ends in .py")
        return name

    @property
    def is_own(self) -> bool:
        """Return whether the file is the user's."""
        return self.name.endswith(".py")

    @property
    def file(self) -> Path:
        """The file as the user has it."""
        return Path(self.name) if self.is_own else SHIPPED[self.kind] / f"{self.name}.py"


class LossConfig(HookConfig):
    """The term of the policy in the loss of a token (Eq. 1), and how tokens are averaged."""

    kind: ClassVar[HookKind] = "loss"
    name: str = Field(
        "grpo", description="grpo, dapo, dr_grpo, gspo, cispo, or the path of a Python file (docs/your_own_method.md)."
    )


class CorrectionConfig(HookConfig):
    """Weights of tokens that correct for the engine, which samples, and the trainer, which computes otherwise."""

    kind: ClassVar[HookKind] = "correction"
    name: str = Field("tis", description="tis, mis, icepop, or the path of a Python file (docs/your_own_method.md).")
    level: Literal["token", "sequence"] = Field(
        "token",
        description=(
            "Of the ratio trainer / engine: of each token by itself, or of its response as a whole, which takes a pass "
            "of log-probabilities more."
        ),
    )


class GeneratorAdvantagesConfig(HookConfig):
    """From the rewards of solutions to the advantages of their tokens (Eqs. 4 to 7)."""

    kind: ClassVar[HookKind] = "generator_advantages"
    name: str = Field(
        "grpo",
        description=(
            "grpo, rloo, reinforce_plus_plus, dr_grpo, dapo, prof, merged, or the path of a Python file "
            "(docs/your_own_method.md)."
        ),
    )


class VerifierAdvantagesConfig(HookConfig):
    """From the rewards of verifications to their advantages (Eq. 9)."""

    kind: ClassVar[HookKind] = "verifier_advantages"
    name: str = Field(
        "grpo",
        description="grpo, rloo, reinforce_plus_plus, dr_grpo, or the path of a Python file (docs/your_own_method.md).",
    )


class AdvantagesConfig(Section):
    """Advantages of each role."""

    generator: GeneratorAdvantagesConfig = GeneratorAdvantagesConfig()
    verifier: VerifierAdvantagesConfig = VerifierAdvantagesConfig()
