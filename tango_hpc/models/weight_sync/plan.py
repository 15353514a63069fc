"""The plan of a weight sync: which slice of a rank's trainer parameter goes to which rank's engine. Pure Python.

Both layouts say which boxes of the Hugging Face tensors a rank holds (`Piece`). Intersecting them gives *segments*:
boxes that lie within one piece on either side. A segment that the receiving rank's own trainer shard holds is copied
locally; any other is sent by one of the ranks that hold it. Sources are chosen on the receiver's node first, then
by the bytes that they already send. So each rank receives exactly the bytes that its engine shard needs and its
trainer shard lacks, once: the lower bound.

Segments travel in *packs* (cut to a quarter of a bucket at most), packs in numbered *rounds*. In one round no rank
sends and receives more than one bucket together, and all ranks go through the rounds in rising order, with two in
flight: so the schedule cannot deadlock, and no rank needs more than two buckets of extra memory. The plan depends
on shapes and sizes only; every rank computes the same one and keeps its own part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from tango_hpc.base.errors import UserError
from tango_hpc.base.model_shape import ModelShape, check_parallel, check_rollout_tensor, hf_tensors, pipeline_stages
from tango_hpc.models.layout.engine_layout import engine_layout
from tango_hpc.models.layout.trainer_layout import Box, megatron_layout

Segment = tuple[str, Box]  # a box of a Hugging Face tensor
Pack = tuple[Segment, ...]

_SMALL_BYTES = 2**20  # below this, joining a message that is sent anyway beats an even spread


@dataclass(frozen=True)
class Layouts:
    """The cuts of one model by trainer and engine over the same ranks.

    Trainer ranks count the tensor axis fastest, then data, then pipeline; rank r is shard r % rollout_tensor of
    engine group r // rollout_tensor.
    """

    shape: ModelShape
    world_size: int
    tensor: int
    pipeline: int
    rollout_tensor: int
    ranks_per_node: int

    def check(self) -> None:
        """Raise UserError where the model or the ranks cannot be cut this way."""
        for name, size in (
            ("training tensor x pipeline", self.tensor * self.pipeline),
            ("rollout tensor", self.rollout_tensor),
        ):
            if self.world_size % size:
                raise UserError(f"{name} size {size} does not divide {self.world_size} ranks")
        check_parallel(self.shape, self.tensor, self.pipeline)
        check_rollout_tensor(self.shape, self.rollout_tensor)

    @property
    def data(self) -> int:
        """Trainer replicas."""
        return self.world_size // (self.tensor * self.pipeline)

    def place(self, rank: int) -> tuple[int, int]:
        """Return (pipeline rank, tensor rank) of the trainer shard of a rank."""
        return rank // (self.tensor * self.data), rank % self.tensor

    def replicas(self, pipeline_rank: int, tensor_rank: int) -> range:
        """Return the ranks that hold one trainer shard."""
        first = tensor_rank + self.tensor * self.data * pipeline_rank
        return range(first, first + self.tensor * self.data, self.tensor)


@dataclass
class Round:
    """One rank's part of a round: peer -> packs, in the order in which they lie in the one message."""

    sends: dict[int, list[Pack]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Pack]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class RankPlan:
    """The work of one rank in a sync: copy `local` segments, and go through `rounds` in order."""

    rank: int
    local: list[Segment] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class RankTotals:
    """Bytes of one sync on one rank."""

    rank: int
    sent_bytes: int
    received_bytes: int
    local_bytes: int
    minimum_bytes: int  # its engine shard needs, its own trainer shard lacks
    gather_bytes: int  # a gather of every full tensor would bring to it
    peak_extra_bytes: int
    buckets: int


@dataclass(frozen=True)
class Plan:
    """Totals of every rank, and what the one rank asked for has to do."""

    totals: list[RankTotals]
    mine: RankPlan | None


def segment_elements(segment: Segment) -> int:
    """Return number of elements in a segment."""
    return math.prod(stop - start for start, stop in segment[1])


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box that two boxes share, None where it is empty."""
    shared = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        shared.append((start, stop))
    return tuple(shared)


def build_plan(layouts: Layouts, *, element_bytes: int, bucket_bytes: int, rank: int | None = None) -> Plan:
    """Return the plan of one sync; `rank` picks the rank whose work is listed, None lists none.

    `element_bytes` is the size of an element on the wire. Raises UserError for layouts that cannot be, and for a
    bucket that cannot hold one row.
    """
    layouts.check()
    matches = match_layouts(layouts)
    schedule = _Schedule(layouts, matches, element_bytes, bucket_bytes, rank)
    schedule.run()
    return Plan(schedule.totals(), schedule.mine)


@dataclass
class Matches:
    """Segments by unit (a layer, the embedding, the output layer) and engine shard, in sending order.

    `classes[c]` is a set of trainer shards that hold the same boxes; `units[u][d]` maps c to engine shard d's
    segments of unit u that class c holds.
    """

    classes: list[tuple[tuple[int, int], ...]]
    units: list[list[dict[int, list[Segment]]]]


def match_layouts(layouts: Layouts) -> Matches:
    """Intersect every engine piece with every trainer piece of its tensor."""
    shape = layouts.shape
    holders: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for pipeline_rank in range(layouts.pipeline):
        for tensor_rank in range(layouts.tensor):
            layout = megatron_layout(shape, layouts.tensor, layouts.pipeline, tensor_rank, pipeline_rank)
            for param in layout.values():
                for piece in param.pieces:
                    holders[piece.tensor][piece.box].append((pipeline_rank, tensor_rank))
    order = _unit_order(layouts)
    class_ids: dict[tuple[tuple[int, int], ...], int] = {}
    units: list[list[dict[int, list[Segment]]]] = [
        [defaultdict(list) for _ in range(layouts.rollout_tensor)] for _ in order
    ]
    for shard in range(layouts.rollout_tensor):
        for param in engine_layout(shape, layouts.rollout_tensor, shard).values():
            for piece in param.pieces:
                covered, unit = 0, units[order[_unit(piece.tensor)]][shard]
                for box, places in holders[piece.tensor].items():
                    shared = intersect(piece.box, box)
                    if shared is not None:
                        segment = (piece.tensor, shared)
                        covered += segment_elements(segment)
                        unit[class_ids.setdefault(tuple(places), len(class_ids))].append(segment)
                assert covered == piece.num_elements, f"{piece} is covered {covered / piece.num_elements} times"
    return Matches(list(class_ids), units)


def _unit(tensor: str) -> str:
    parts = tensor.split(".")
    return parts[2] if tensor.startswith("model.layers.") else tensor


def _unit_order(layouts: Layouts) -> dict[str, int]:
    """Return the order of sending: layers alternate between pipeline stages, so that all stages send all the time."""
    stages = pipeline_stages(layouts.shape.num_layers, layouts.pipeline)
    names = ["model.embed_tokens.weight"]
    for depth in range(max(map(len, stages))):
        names += [str(stage[depth]) for stage in stages if depth < len(stage)]
    names += ["model.norm.weight", "lm_head.weight"]
    return {name: index for index, name in enumerate(names)}


class _Schedule:
    """Chooses a source and a round for every pack, rank by rank and unit by unit."""

    def __init__(
        self, layouts: Layouts, matches: Matches, element_bytes: int, bucket_bytes: int, rank: int | None
    ) -> None:
        self.layouts, self.matches = layouts, matches
        self.element_bytes, self.bucket_bytes = element_bytes, bucket_bytes
        world = layouts.world_size
        self.ranks_of_class = [
            sorted({rank for place in places for rank in layouts.replicas(*place)}) for places in matches.classes
        ]
        self.classes_of_place: dict[tuple[int, int], set[int]] = defaultdict(set)
        for index, places in enumerate(matches.classes):
            for place in places:
                self.classes_of_place[place].add(index)
        self.near: dict[tuple[int, int], list[int]] = {}
        self.sent, self.received, self.local = [0] * world, [0] * world, [0] * world
        # Of each rank: the number of its latest round, bytes in it and in the one before, largest sum, how many.
        self.round, self.fill, self.before, self.peak, self.count = ([0] * world for _ in range(5))
        self.mine = RankPlan(rank) if rank is not None else None
        self.my_rounds: dict[int, Round] = defaultdict(Round)

    def run(self) -> None:
        """Go through all units, and within one through all ranks."""
        packs = _Packer(self.element_bytes, self.bucket_bytes)
        for unit in self.matches.units:
            cut = [[(index, packs.cut(segments), segments) for index, segments in shard.items()] for shard in unit]
            for rank in range(self.layouts.world_size):
                self._deliver(rank, cut[rank % self.layouts.rollout_tensor])
        if self.mine is not None:
            self.mine.rounds = [self.my_rounds[number] for number in sorted(self.my_rounds)]

    def _deliver(self, rank: int, needs: list[tuple[int, list[tuple[int, Pack]], list[Segment]]]) -> None:
        """Plan the transfer of everything of one unit that one rank's engine shard needs."""
        own = self.classes_of_place[self.layouts.place(rank)]
        joined = -1  # a source that already sends to this rank in this unit
        for index, packs, segments in needs:
            if index in own:
                self.local[rank] += sum(size for size, _ in packs)
                if self.mine is not None and rank == self.mine.rank:
                    self.mine.local += segments
                continue
            candidates = self._candidates(index, rank)
            for size, pack in packs:
                if size >= _SMALL_BYTES or joined not in candidates:
                    joined = self._lightest(candidates, rank)
                self._send(joined, rank, size, pack)

    def _candidates(self, index: int, rank: int) -> list[int]:
        """Return the ranks of the receiver's node that hold class `index`; where the node has none, all such ranks."""
        node = rank // self.layouts.ranks_per_node
        key = (index, node)
        if key not in self.near:
            ranks = self.ranks_of_class[index]
            self.near[key] = [r for r in ranks if r // self.layouts.ranks_per_node == node] or ranks
        return self.near[key]

    def _lightest(self, candidates: list[int], rank: int) -> int:
        """Return the candidate that sends least so far; ties rotate with the receiver."""
        if len(candidates) == 1:
            return candidates[0]
        at = rank % len(candidates)
        return min(candidates[at:] + candidates[:at], key=self.sent.__getitem__)

    def _send(self, source: int, target: int, size: int, pack: Pack) -> None:
        """Put a pack into the first round from both ranks' latest on that has room at both."""
        self.sent[source] += size
        self.received[target] += size
        number = max(self.round[source], self.round[target])
        room = self.bucket_bytes - size
        if any(self.round[r] == number and self.fill[r] > room for r in (source, target)):
            number += 1
        for r in (source, target):
            if self.round[r] < number or not self.count[r]:
                self.before[r], self.fill[r], self.round[r] = self.fill[r], 0, number
                self.count[r] += 1
            self.fill[r] += size
            self.peak[r] = max(self.peak[r], self.before[r] + self.fill[r])
        if self.mine is not None:
            if source == self.mine.rank:
                self.my_rounds[number].sends[target].append(pack)
            elif target == self.mine.rank:
                self.my_rounds[number].receives[source].append(pack)

    def totals(self) -> list[RankTotals]:
        """Return sums of every rank; the lower bound is counted from the layouts, not from what was sent."""
        layouts, matches, size = self.layouts, self.matches, self.element_bytes
        lacking: dict[tuple[tuple[int, int], int], int] = {}
        for place, own in self.classes_of_place.items():
            for shard in range(layouts.rollout_tensor):
                lacking[place, shard] = size * sum(
                    sum(map(segment_elements, segments))
                    for unit in matches.units
                    for index, segments in unit[shard].items()
                    if index not in own
                )
        full = sum(math.prod(s) for s in hf_tensors(layouts.shape).values())
        held: dict[tuple[int, int], int] = {}
        for pipeline_rank in range(layouts.pipeline):
            for tensor_rank in range(layouts.tensor):
                boxes = {
                    (piece.tensor, piece.box): piece.num_elements
                    for param in megatron_layout(
                        layouts.shape, layouts.tensor, layouts.pipeline, tensor_rank, pipeline_rank
                    ).values()
                    for piece in param.pieces
                }
                held[pipeline_rank, tensor_rank] = sum(boxes.values())
        return [
            RankTotals(
                rank=rank,
                sent_bytes=self.sent[rank],
                received_bytes=self.received[rank],
                local_bytes=self.local[rank],
                minimum_bytes=lacking[layouts.place(rank), rank % layouts.rollout_tensor],
                gather_bytes=size * (full - held[layouts.place(rank)]),
                peak_extra_bytes=self.peak[rank],
                buckets=self.count[rank],
            )
            for rank in range(layouts.world_size)
        ]


class _Packer:
    """Cuts the segments of one source into packs of at most a quarter of a bucket."""

    def __init__(self, element_bytes: int, bucket_bytes: int) -> None:
        self.element_bytes, self.limit = element_bytes, bucket_bytes // 4

    def cut(self, segments: list[Segment]) -> list[tuple[int, Pack]]:
        """Return (bytes, pack) in order; a segment that is larger than a pack is cut by rows."""
        packs: list[tuple[int, Pack]] = []
        current: list[Segment] = []
        filled = 0
        for segment in segments:
            for part in self._rows(segment):
                size = segment_elements(part) * self.element_bytes
                if current and filled + size > self.limit:
                    packs.append((filled, tuple(current)))
                    current, filled = [], 0
                current.append(part)
                filled += size
        if current:
            packs.append((filled, tuple(current)))
        return packs

    def _rows(self, segment: Segment) -> list[Segment]:
        tensor, ((start, stop), *rest) = segment
        row_bytes = self.element_bytes * math.prod(b - a for a, b in rest)
        if row_bytes > self.limit:
            raise UserError(
                f"reshard.bucket_mb: one row of {tensor} has {row_bytes} bytes, "
                f"more than a quarter of a bucket ({self.limit} bytes); use a larger bucket"
            )
        step = self.limit // row_bytes
        if stop - start <= step:
            return [segment]
        return [(tensor, ((at, min(at + step, stop)), *rest)) for at in range(start, stop, step)]
