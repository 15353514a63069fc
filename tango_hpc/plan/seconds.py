"""Seconds of each phase of a step, and what bounds them: a roofline for each kind of work, on one rank.

- An engine reads prompts at a share of the peak: 2 operations a parameter and token (Kaplan et al., arXiv 2001.08361,
  Section 2.1), each prompt once, as solutions of one question share its cache.
- An engine writes a token for each sequence in a step. A step reads all weights and the cache of the sequences, or
  multiplies, whichever takes longer (Pope et al., arXiv 2211.05102, Section 2); tensor ranks add two all-reduces a
  layer (Megatron-LM, arXiv 1909.08053). `_decode` goes from one end of a response to the next: as responses end,
  others take their places, and the last ones run alone.
- Training: 6 operations a parameter and token, 4 where weights are frozen, and a forward pass again where activations
  are recomputed; causal attention (`models.trainer.flops`); activations that go through memory; a pipeline's bubble
  (Narayanan et al., arXiv 2104.04473, Section 2.2); gradients reduced in fp32 over data ranks (ring: 2 (d − 1) / d).
- A GPU that trainer and engine share in turns: bytes over the host link. Weight sync: bytes over the slowest link.

Shape suffixes: `base.types`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tango_hpc.base.config import Config
from tango_hpc.base.model_shape import ELEMENT_BYTES, ModelShape
from tango_hpc.method.hooks import known_hook
from tango_hpc.method.role_schedule import role_schedule
from tango_hpc.models.engine.capacity import Engine, engine_memory, role_engine
from tango_hpc.models.weight_sync.planned import plan_report as sync_report
from tango_hpc.plan.batch import role_batch
from tango_hpc.plan.cards import Machine
from tango_hpc.plan.lengths import Lengths, Load
from tango_hpc.plan.sizes import Trainer, trainer_of

# Of the sequences that an engine began with: when fewer than this share are left, the longest responses bound it.
TAIL = 0.1
MEMORY_PASSES = 3  # activations of a layer are written, read, and their gradients written and read half as often
STEPS_OF_A_SOLUTION = 5  # that are tried (`algorithm.step_labels`)
# Bytes of a parameter that an optimizer's step reads and writes: gradient, master, two moments, weight.
OPTIMIZER_BYTES = 4 + 2 * (4 + 4 + 4) + 2


@dataclass(frozen=True)
class Cost:
    """Seconds of one phase, by what takes them."""

    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds together."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=lambda name: self.parts[name]) if self.seconds else "nothing"

    def __add__(self, other: Cost) -> Cost:
        return Cost(Counter(self.parts) + Counter(other.parts))

    def times(self, factor: float) -> Cost:
        """Return the cost of doing it `factor` times."""
        return Cost({name: factor * value for name, value in self.parts.items()})


Phases = dict[str, Cost]  # by the names that metrics.jsonl has


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a run: `steps` has the phases of a step by its role; `num_steps` how many steps there are."""

    steps: Mapping[str, Phases]
    num_steps: Mapping[str, int]
    evaluation: Cost
    num_evaluations: int
    checkpoint: Cost
    num_checkpoints: int
    start: float
    ranks: int

    def step_seconds(self, role: str) -> float:
        """Seconds of one step of a role."""
        return sum(cost.seconds for cost in self.steps[role].values())

    @property
    def run_seconds(self) -> float:
        """Seconds of the whole run in one job."""
        steps = sum(count * self.step_seconds(role) for role, count in self.num_steps.items())
        more = self.num_evaluations * self.evaluation.seconds + self.num_checkpoints * self.checkpoint.seconds
        return self.start + steps + more

    @property
    def rank_hours(self) -> float:
        """Hours of all ranks together: GPU-hours."""
        return self.ranks * self.run_seconds / 3600

    def num_jobs(self, limit_seconds: float, grace_seconds: float) -> int | None:
        """Return how many jobs of a time limit the run takes; None where a job ends before its first steps."""
        longest = max((self.step_seconds(role) for role in self.steps), default=0.0)
        useful = limit_seconds - self.start - grace_seconds
        return None if useful <= longest else -int(-(self.run_seconds - self.start) // useful)


def plan_time(config: Config, machine: Machine, load: Load) -> TimePlan:
    """Return the seconds of a training run. Raises UserError without a model's sizes."""
    costs = Costs(config, machine, load)
    schedule = role_schedule(config)
    num_steps = Counter(schedule)
    saved = config.checkpoint.every_steps
    leading = "generator" if config.generator.trainable else "verifier"
    return TimePlan(
        steps={role: costs.step(role) for role in config.roles if num_steps[role]},
        num_steps=num_steps,
        evaluation=costs.evaluation(),
        num_evaluations=1 + _num_evaluations(config, num_steps[leading]),
        checkpoint=Cost() if config.checkpoint.background else costs.checkpoint(),
        num_checkpoints=1 + (max(len(schedule) - 1, 0) // saved if saved else 0),
        start=machine.rates.start,
        ranks=config.world_size,
    )


def _num_evaluations(config: Config, num_steps: int) -> int:
    """Return the evaluations after the first: every so many steps of the leading role, behind the warm-up, at the
    end.
    """
    every, warm_up = config.train.eval_every, config.train.verifier_warmup_steps
    return -(-num_steps // every) + int(warm_up > 0) if every else 1


def step_phases(config: Config, machine: Machine, load: Load, role: str) -> Phases:
    """Return the phases of an optimizer step of a role."""
    return Costs(config, machine, load).step(role)


@dataclass(frozen=True)
class Costs:
    """The costs of the parts of a run on one rank of a machine."""

    config: Config
    machine: Machine
    load: Load

    def step(self, role: str) -> Phases:
        """Return the phases of an optimizer step of a role."""
        train, found = self.config.train, self.written(role)
        asked = self._questions(role)
        if role == "generator":
            solutions = asked * train.rollouts_per_question
        else:
            solutions = asked + train.questions_per_step * train.rollouts_per_question
            found |= self.tries()
        updated = [role, "verifier"] if train.joint else [role]
        for name in updated:
            found["logprobs"] = found.get("logprobs", Cost()) + self.logprobs(name)
            found["train"] = found.get("train", Cost()) + self.update(name)
        model = self.config.model_of(role)
        found |= {"reshard": self.sync(model)} | self.turns(model)
        rates = self.machine.rates
        found["score"] = Cost({"overheads": rates.score + rates.score_response * solutions})
        return found

    def _questions(self, role: str) -> int:
        """Return the questions that a step of a role draws."""
        return round(self.config.train.questions_per_step * self.load.draws[role])

    # -- engines -----------------------------------------------------------------------------------------------

    def written(self, role: str) -> Phases:
        """Return what engines write in a step of a role."""
        train, asked = self.config.train, self._questions(role)
        if role == "verifier":
            judged = train.questions_per_step * train.rollouts_per_question
            return {
                "rollout": self.generation("generator", asked, asked),
                "verify": self.generation("verifier", judged, train.questions_per_step),
            }
        solutions = asked * train.rollouts_per_question
        found = {"rollout": self.generation("generator", solutions, asked)}
        if self.config.verifier is not None:
            found["verify"] = self.generation("verifier", solutions * train.verifications_per_solution, solutions)
        return found

    def generation(self, role: str, responses: int, prompts: int, lengths: Lengths | None = None) -> Cost:
        """Return what the engines of a role take for responses to so many different prompts."""
        lengths = lengths or self.load.lengths[role]
        engine = role_engine(self.config, role)
        groups = self.config.world_size // engine.tensor
        count = -(-responses // groups)
        texts = min(-(-prompts // groups), count) * lengths.prompt
        memory = engine_memory(self.config, role, int((self.machine.memory_gib or 0) * 2**30))
        held = max(memory.cache, 0) / engine.cache_bytes_per_token / max(lengths.prompt + lengths.response, 1)
        slots = max(min(memory.num_seqs, int(held)), 1)
        prefill = {"arithmetic": self.arithmetic(engine.shape, texts, 2) / engine.tensor / self.machine.rates.prefill}
        return Cost(prefill) + self._decode(engine, lengths, count, slots)

    def _decode(self, engine: Engine, lengths: Lengths, count: int, slots: int) -> Cost:
        """Return what an engine takes to write `count` responses, `slots` at once."""
        waiting = list(lengths.responses(count)[::-1])  # the shortest last
        waiting = waiting[::2] + waiting[1::2]  # in no order of length: every second, then the others
        running: list[tuple[float, float]] = []  # the step at which each ends, and its length
        now, cached = 0.0, 0.0
        parts: dict[str, float] = {}
        first, per_step = min(slots, count), self._token_step(engine)
        while waiting or running:
            while waiting and len(running) < slots:
                length = waiting.pop()
                heapq.heappush(running, (now + length, length))
                cached += lengths.prompt
            end, length = heapq.heappop(running)
            active, steps = len(running) + 1, end - now
            is_tail = active < TAIL * first and not waiting
            for name, value in per_step(active, cached + active * steps / 2).items() if steps else ():
                part = "longest response" if is_tail else name
                parts[part] = parts.get(part, 0.0) + steps * value
            cached += active * steps - lengths.prompt - length
            now = end
        return Cost(parts)

    def _token_step(self, engine: Engine) -> Callable[[int, float], dict[str, float]]:
        """Return the function that gives seconds of an engine's step for so many sequences, which have so many tokens
        in the cache together.
        """
        shape, rates, machine = engine.shape, self.machine.rates, self.machine
        width = shape.num_layers * shape.num_heads * shape.head_dim / engine.tensor
        per_sequence, weights = self.operations(shape, 1, 2) / engine.tensor, engine.weights
        per_token = engine.cache_bytes_per_token

        def seconds(active: int, cached: float) -> dict[str, float]:
            arithmetic = (active * per_sequence + 4 * width * cached) / machine.operations / rates.decoding
            memory = (weights + cached * per_token) / machine.bandwidth / rates.reading
            found = {"memory": memory} if memory > arithmetic else {"arithmetic": arithmetic}
            found["overheads"] = rates.decode_step + rates.decode_sequence * active
            if engine.tensor > 1:
                found["links"] = self.all_reduce(2 * shape.num_layers, active * shape.hidden_size, engine.tensor)
            return found

        return seconds

    def tries(self) -> Phases:
        """Return what labels of steps by trying take: continuations, on average of half a response."""
        settings = self.config.algorithm.step_labels
        if settings is None:
            return {}
        own = self.load.lengths["generator"]
        half = Lengths(own.prompt + own.response / 2, own.response / 2, own.longest, own.spread)
        starts = settings.solutions * STEPS_OF_A_SOLUTION
        return {"try": self.generation("generator", starts * settings.continuations, starts, half)}

    # -- trainers ----------------------------------------------------------------------------------------------

    def logprobs(self, role: str) -> Cost:
        """Return the passes without gradients: of the reference, for a correction of whole responses, and between
        updates where the loss needs the ratio of a response.
        """
        algorithm, num_updates = self.config.algorithm, self.config.train.updates_per_batch
        count = int(algorithm.kl_coef > 0)
        count += int(algorithm.correction is not None and algorithm.correction.level == "sequence")
        if "sequence_ratio" in known_hook(self.config.run.dir, algorithm.loss).needs:
            count += num_updates - 1
        return self.passes(role, 2.0, self.machine.rates.training, 0.0).times(count) if count else Cost()

    def update(self, role: str) -> Cost:
        """Return the updates of a step: forward, backward, gradients of all data ranks, optimizer."""
        settings = self.config.models[self.config.model_of(role)]
        frozen = settings.adapter is not None
        forward_again = {"none": 0.0, "selective": 0.1, "full": 1.0}[settings.recompute]
        operations = (4.0 if frozen else 6.0) + 2.0 * forward_again
        cost = self.passes(role, operations, self.machine.rates.training, forward_again)
        trainer = self._trainer(role)
        sizes, rates, machine = trainer.sizes, self.machine.rates, self.machine
        own = {"memory": sizes.trained / trainer.data * OPTIMIZER_BYTES / machine.bandwidth, "overheads": rates.update}
        if trainer.data > 1:
            link, name = self._link(trainer.tensor * trainer.data)
            own[name] = 2 * sizes.gradients * (trainer.data - 1) / trainer.data / link
        return (cost + Cost(own)).times(self.config.train.updates_per_batch)

    def passes(self, role: str, per_parameter: float, share: float, forward_again: float) -> Cost:
        """Return the passes of a rank over its share of a role's batch, with so many operations a parameter and token;
        beside arithmetic memory, collectives of tensor ranks and what each layer of a micro-batch costs at least.
        """
        trainer, machine, rates = self._trainer(role), self.machine, self.machine.rates
        lengths, batch = self.load.lengths[role], role_batch(self.config, role)
        length = lengths.prompt + lengths.response
        tokens = batch.responses * length / trainer.data
        most = self.config.roles[role].micro_batch_tokens
        micro_batches = max(-(-tokens // most), trainer.pipeline)
        layers = trainer.shape.num_layers / trainer.pipeline
        backward = per_parameter > 2.0
        cuts = trainer.tensor * trainer.pipeline
        arithmetic = self.arithmetic(trainer.shape, tokens, per_parameter, length) / cuts / share
        traffic = tokens * layers * trainer.saved_per_token() * (MEMORY_PASSES if backward else 1)
        found = {
            "arithmetic": arithmetic,
            "memory": traffic / machine.bandwidth / rates.activations,
            "overheads": micro_batches * layers * rates.layer * (1.0 if backward else 0.4),
        }
        if trainer.tensor > 1:
            number = layers * (2 + (2 + 2 * forward_again if backward else 0))
            each = tokens / micro_batches * trainer.shape.hidden_size
            found["links"] = micro_batches * self.all_reduce(number, each, trainer.tensor)
        bubble = (micro_batches + trainer.pipeline - 1) / micro_batches
        return Cost(found).times(bubble)

    # -- between trainer and engine ----------------------------------------------------------------------------

    def sync(self, model: str) -> Cost:
        """Return the weight sync after a step that has updated a model."""
        report = sync_report(self.config).get(model)
        if report is None:
            return Cost()
        ranks, tensor = report["ranks"], self.config.models[model].parallel
        link, name = self._link(tensor.tensor * tensor.pipeline)
        received = max(rank["received_bytes"] for rank in ranks)
        local = max(rank["local_bytes"] for rank in ranks)
        return Cost({name: received / link, "memory": 2 * (local + received) / self.machine.bandwidth})

    def turns(self, model: str) -> Phases:
        """Return what giving a GPU from trainer to engine and back takes; nothing on a CPU."""
        if self.config.launch.device == "cpu":
            return {}
        trainer, link = self._trainer(model), self.machine.host_link * self.machine.rates.links
        down = trainer.sizes.kept + trainer.sizes.optimizer
        return {"onload": Cost({"host link": trainer.uploads() / link}), "offload": Cost({"host link": down / link})}

    # -- beside the steps --------------------------------------------------------------------------------------

    def evaluation(self) -> Cost:
        """Return an evaluation: a solution of each question, judged, and those of the first evaluation judged again."""
        count = self.config.data.eval_questions
        found = self.generation("generator", count, count)
        return found if self.config.verifier is None else found + self.generation("verifier", 2 * count, 2 * count)

    def checkpoint(self) -> Cost:
        """Return the writing of a checkpoint, over the disk's rate of a node."""
        size = 0
        for name, role in self.config.models.items():
            if role.trainable:
                trainer = self._trainer(name)
                size += trainer.saved(0) * self.config.world_size
        return Cost({"disk": size / self.config.launch.nodes / self.machine.disk})

    # -- parts of formulas -------------------------------------------------------------------------------------

    def operations(self, shape: ModelShape, tokens: float, per_parameter: float, length: float = 0.0) -> float:
        """Return operations over tokens of sequences of a `length`: of weights that are multiplied, and of causal
        attention in the same proportion.
        """
        embedding = 0 if shape.tied else shape.vocab_size * shape.hidden_size  # looked up, not multiplied
        attention = shape.num_layers * shape.num_heads * shape.head_dim * length
        return per_parameter * tokens * (shape.num_parameters - embedding + attention)

    def arithmetic(self, shape: ModelShape, tokens: float, per_parameter: float, length: float = 0.0) -> float:
        """Return seconds of these operations at the peak of a rank."""
        return self.operations(shape, tokens, per_parameter, length) / self.machine.operations

    def all_reduce(self, number: float, elements: float, size: int) -> float:
        """Return seconds of so many all-reduces of `elements` each among tensor ranks of a node."""
        moved = 2 * (size - 1) / size * elements * ELEMENT_BYTES[self.config.launch.dtype]
        return number * (self.machine.rates.collective + moved / self.machine.peer_link / self.machine.rates.links)

    def _link(self, num_ranks: int) -> tuple[float, str]:
        """Return bytes a second of the slowest link among so many neighbouring ranks, and its name."""
        share = self.machine.rates.links
        if num_ranks > self.config.launch.tasks_per_node:
            return self.machine.network * share, "network"
        return self.machine.peer_link * share, "links"

    def _trainer(self, role: str) -> Trainer:
        """Return the trainer of a role's model on the first stage of its pipeline."""
        return trainer_of(self.config, self.config.model_of(role), 0)
