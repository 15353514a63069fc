"""Checkpoints are complete or not there; damaged ones are named, set aside and passed over, by all ranks alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tango_hpc.base.config.schema import CheckpointConfig
from tango_hpc.base.errors import CheckFailed
from tango_hpc.base.run.directory import RunDirectory
from tango_hpc.base.run.summary import read_provenance
from tests.helpers.ranks import run_ranks

BYTES = 70_000


class Part:
    """Stands where a policy stands; each rank writes one file, and rank 0 one that is summed by others."""

    def __init__(self, value: int, full_disk: bool = False, forgetful_disk: bool = False) -> None:
        self.value, self.full_disk, self.forgetful_disk = value, full_disk, forgetful_disk

    def begin_save(self, folder: Path, *, background: bool) -> None:
        self.folder, self.written = folder, not background

    def is_written(self) -> bool:
        return self.written

    def end_save(self) -> dict:
        import torch.distributed as dist

        from tango_hpc.base.run.manifest import summed_file

        rank, folder = dist.get_rank(), self.folder
        folder.mkdir(exist_ok=True)
        if rank == 0:
            (folder / "common").write_text("all")
        if self.full_disk and rank == 1:
            raise OSError(28, "No space left on device")
        with summed_file(folder / f"__{rank}_0.distcp") as file:
            file.write(str(self.value).encode())
            file.write(memoryview(bytes(BYTES)))
            sums = {file.path.name: file.close()}
        if self.forgetful_disk and rank == 1:
            (folder / f"__{rank}_0.distcp").write_bytes(b"")
        return sums

    def load(self, folder: Path) -> None:
        import torch.distributed as dist

        self.value = int((folder / f"__{dist.get_rank()}_0.distcp").read_bytes()[:-BYTES])


def save_and_load(path: Path) -> list[str]:
    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.models.trainer.checkpoints import Checkpoints

    directory, exchange = RunDirectory(path), Exchange(["generator"], "generator")
    checkpoints = Checkpoints(directory, "train", CheckpointConfig(keep=2), exchange)
    assert checkpoints.latest() is None
    for step, phase in ((1, ""), (2, "rollout"), (2, ""), (2, "verify")):
        checkpoints.save(step, phase, {"generator": Part(step)}, {"step": step, "phase": phase})
    with pytest.raises(
        CheckFailed,
        match=r"could not save .*step_000003 \(.* GB free there, the last one took .* GB\).*No space left.*"
        r"step_000002\+verify.*--resume",
    ):
        checkpoints.save(3, "", {"generator": Part(3, full_disk=True)}, {"step": 3})
    left = sorted(entry.name for entry in (path / "checkpoints/train").iterdir())
    assert left == ["step_000002+rollout", "step_000002+verify"], "a half-written one takes room"
    # A file that is not what was written: neither is it called a checkpoint, nor do others go for it.
    strict = Checkpoints(directory, "train", CheckpointConfig(keep=1), exchange)
    with pytest.raises(CheckFailed, match=r"not kept what was written: generator/__1_0.distcp is empty"):
        strict.save(3, "", {"generator": Part(3, forgetful_disk=True)}, {"step": 3})
    assert sorted(entry.name for entry in (path / "checkpoints/train").iterdir()) == left
    restarted = Checkpoints(directory, "train", CheckpointConfig(keep=2), exchange)
    latest = restarted.latest()
    assert latest is not None
    part = Part(0)
    state = restarted.load(latest, {"generator": part})
    assert (state, part.value) == ({"step": 2, "phase": "verify"}, 2)
    return sorted(entry.name for entry in latest.parent.iterdir())


def save_beside(path: Path) -> list[list[str]]:
    """What lies in the folder after each call of a save in the background, of which one fails."""
    import torch.distributed as dist

    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.models.trainer.checkpoints import Checkpoints

    exchange, found = Exchange(["generator"], "generator"), []
    checkpoints = Checkpoints(RunDirectory(path), "train", CheckpointConfig(keep=2), exchange)

    def look() -> None:
        dist.barrier()
        found.append(sorted(entry.name for entry in (path / "checkpoints/train").iterdir()))
        dist.barrier()

    first, second = Part(1), Part(2)
    checkpoints.complete()  # nothing was begun
    checkpoints.save(1, "", {"generator": first}, {"step": 1}, background=True)
    look()
    first.written = dist.get_rank() == 0  # the other rank still writes
    checkpoints.complete(wait=False)
    look()
    first.written = True
    checkpoints.complete(wait=False)
    look()
    checkpoints.save(2, "", {"generator": second}, {"step": 2}, background=True)
    checkpoints.save(3, "", {"generator": Part(3)}, {"step": 3})  # in front: the one before is waited for
    look()
    checkpoints.save(4, "", {"generator": Part(4)}, {"step": 4}, background=True)
    assert checkpoints.latest() == path / "checkpoints/train/step_000004"  # whoever goes back waits for it
    full = Part(5, full_disk=True)
    checkpoints.save(5, "", {"generator": full}, {"step": 5}, background=True)
    full.written = True
    with pytest.raises(CheckFailed, match=r"could not save .*step_000005 .*No space left.*step_000004;.*--resume"):
        checkpoints.complete(wait=False)
    look()
    return found


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    first, second = run_ranks(save_beside, 2, tmp_path / "run")
    assert first == second
    assert first == [
        [".step_000001"], [".step_000001"], ["step_000001"], ["step_000002", "step_000003"],
        ["step_000003", "step_000004"],
    ]  # fmt: skip


class TrainedPart(Part):
    """A part with a file that only training needs."""

    def end_save(self) -> dict:
        import torch.distributed as dist

        sums = super().end_save()
        (self.folder / f"__{dist.get_rank()}_training.distcp").write_text("moments")
        return sums


def keep_the_weights_of_some(path: Path) -> list[dict[str, bool]]:
    """Which checkpoints are there after each save, and whether they are whole; what is there when a run goes on."""
    import torch.distributed as dist

    from tango_hpc.base.run.step_names import steps_in
    from tango_hpc.base.run.weights_alone import is_for_readers, is_whole
    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.models.trainer.checkpoints import Checkpoints, find_damage

    directory, exchange, found = RunDirectory(path), Exchange(["generator"], "generator"), []
    folder, kept = directory.checkpoints / "train", CheckpointConfig(keep=2, keep_weights=2)

    def look() -> None:
        dist.barrier()
        found.append({checkpoint.name: is_whole(checkpoint) for _, checkpoint in steps_in(folder)})
        for _, checkpoint in steps_in(folder):
            there = {file.name for file in checkpoint.rglob("*") if file.is_file()}
            assert (
                is_whole(checkpoint)
                == ("state.json" in there)
                == any(name.endswith("training.distcp") for name in there)
            )
            assert find_damage(checkpoint, exchange) is None
        dist.barrier()

    checkpoints = Checkpoints(directory, "train", kept, exchange)
    for step, phase in ((1, ""), (2, ""), (2, "rollout"), (3, ""), (4, "verify"), (5, ""), (6, "")):
        checkpoints.save(step, phase, {"generator": TrainedPart(step)}, {"step": step})
        look()
    if dist.get_rank() == 0:  # a damage of what evaluation does not read, and what a kill has left
        (folder / "step_000005/generator/__0_training.distcp").write_text("-")
        (folder / "step_000004+verify/generator/__0_training.distcp").write_text("-")
    dist.barrier()
    assert find_damage(folder / "step_000005", exchange, is_for_readers) is None
    assert find_damage(folder / "step_000005", exchange) is not None
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "step_000005/generator/__0_training.distcp").write_text("moments")
    dist.barrier()
    again = Checkpoints(directory, "train", kept, exchange)
    look()
    assert again.latest() == folder / "step_000006"
    # Somebody has taken the whole ones away, and brought an older one back: steps are done again.
    if dist.get_rank() == 0:
        for step in (5, 6):
            shutil.rmtree(folder / f"step_{step:06d}")
    dist.barrier()
    with pytest.raises(CheckFailed, match=r"step_000004\+verify holds weights alone.*bring one back.*--step 4"):
        again.latest()
    again.save(3, "", {"generator": TrainedPart(3)}, {"step": 3})
    look()
    return found


def test_older_checkpoints_are_weights_alone(tmp_path: Path) -> None:
    first, second = run_ranks(keep_the_weights_of_some, 2, tmp_path / "run")
    assert first == second
    *_, of_4, of_5, of_6, restarted, redone = first
    assert first[:4] == [
        {"step_000001": True},
        {"step_000001": True, "step_000002": True},
        {"step_000001": False, "step_000002": True, "step_000002+rollout": True},
        {"step_000001": False, "step_000002+rollout": True, "step_000003": True},
    ]
    assert of_4 == {
        "step_000001": False, "step_000002+rollout": False, "step_000003": True, "step_000004+verify": True,
    }  # fmt: skip
    assert of_5 == {
        "step_000002+rollout": False, "step_000003": False, "step_000004+verify": True, "step_000005": True,
    }  # fmt: skip
    assert of_6 == restarted == {
        "step_000003": False, "step_000004+verify": False, "step_000005": True, "step_000006": True,
    }  # fmt: skip
    assert redone == {"step_000003": True, "step_000004+verify": False}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda it: flip(it / "generator/__1_0.distcp"), "generator/__1_0.distcp is not what was written"),
    "in what is common": (lambda it: flip(it / "generator/common"), "generator/common is not what was written"),
    "in the state": (lambda it: flip(it / "state.json"), "state.json is not what was written"),
    "truncated": (
        lambda it: (it / "generator/__0_0.distcp").write_bytes(b"2abc"),
        "generator/__0_0.distcp has 4 of 70,001 bytes",
    ),
    "emptied": (lambda it: (it / "generator/__0_0.distcp").write_bytes(b""), "generator/__0_0.distcp is empty"),
    "deleted": (lambda it: (it / "generator/__1_0.distcp").unlink(), "generator/__1_0.distcp is missing"),
    "no manifest": (lambda it: (it / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda it: (it / "manifest.json").write_text('{"files": {'), "manifest.json is damaged"),
}


def damage_and_go_on(path: Path) -> dict[str, tuple[str, int, list[str], list[str]]]:
    """For each damage of the newest checkpoint: which is taken, its value, what is told, what lies there then."""
    import torch.distributed as dist

    from tango_hpc.models.parallel.exchange import Exchange
    from tango_hpc.models.trainer.checkpoints import Checkpoints

    exchange = Exchange(["generator"], "generator")
    checkpoints = Checkpoints(RunDirectory(path), "train", CheckpointConfig(keep=3), exchange)
    for step in (1, 2):
        checkpoints.save(step, "", {"generator": Part(step)}, {"step": step})
    found = {}
    for name, (damage, _) in DAMAGES.items():
        directory = RunDirectory(path.with_name(name))
        if dist.get_rank() == 0:
            shutil.copytree(path, directory.path)
            damage(directory.checkpoints / "train" / "step_000002")
            entry = {"stage": "train", "resumed_from": "step_000002"}
            directory.provenance.write_text(json.dumps({"attempts": [entry]}) if name != "emptied" else "")
        dist.barrier()
        again, part = Checkpoints(directory, "train", CheckpointConfig(keep=1), exchange), Part(0)
        latest = again.latest()
        assert latest is not None
        again.load(latest, {"generator": part})
        again.save(2, "", {"generator": Part(2)}, {"step": 2})
        there = sorted(entry.name for entry in (directory.checkpoints / "train").iterdir())
        found[name] = (latest.name, part.value, again.set_aside, there)
        resumed_from = [entry["resumed_from"] for entry in read_provenance(directory)["attempts"]]
        assert resumed_from == ([latest.name] if name != "emptied" else [])
        assert Checkpoints(directory, "train", CheckpointConfig(keep=1), exchange).latest() == latest.with_name(
            "step_000002"
        )
    # All of them: nothing is begun anew in their place, and nothing is touched.
    if dist.get_rank() == 0:
        for checkpoint in (path / "checkpoints/train").iterdir():
            flip(checkpoint / "state.json")
    dist.barrier()
    with pytest.raises(
        CheckFailed, match=r"no checkpoint in .* is intact:\n  step_000002: state.json is not[^\n]*\n  step_000001"
    ):
        Checkpoints(RunDirectory(path), "train", CheckpointConfig(keep=1), exchange).latest()
    assert sorted(entry.name for entry in (path / "checkpoints/train").iterdir()) == ["step_000001", "step_000002"]
    return found


def test_a_full_disk_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    for names in run_ranks(save_and_load, 2, tmp_path):
        assert names == ["step_000002+rollout", "step_000002+verify"]


def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_intact_one_before_it_taken(tmp_path: Path) -> None:
    both = run_ranks(damage_and_go_on, 2, tmp_path / "run")
    assert both[0] == both[1]
    for name, (_, told) in DAMAGES.items():
        taken, value, messages, there = both[0][name]
        assert (taken, value) == ("step_000001", 1), name
        (message,) = messages
        assert message.startswith(f"checkpoint step_000002 is damaged ({told}"), message
        assert message.endswith("set aside as step_000002.damaged; the run goes on from step_000001")
        assert there == ["step_000002", "step_000002.damaged"]
    manifest = json.loads((tmp_path / "a flipped bit/checkpoints/train/step_000002/manifest.json").read_text())
    assert set(manifest["files"]) == {
        "generator/__0_0.distcp",
        "generator/__1_0.distcp",
        "generator/common",
        "state.json",
    }
    import zlib

    expected = zlib.crc32(b"2" + bytes(BYTES))  # of what was written, by hand
    assert manifest["files"]["generator/__0_0.distcp"] == {"size": BYTES + 1, "crc32": expected}
