"""Packages for a GPU machine without a network: unpacked from a folder of wheels, and what is missing still.

A wheel may lie there in pieces, NAME.whl.part00, NAME.whl.part01 and so on, and may be brought piece by piece.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import NormalizedName, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
PIECE = re.compile(r"(.+\.whl)\.part(\d+)")


class WheelError(Exception):
    """A folder of wheels that cannot be used, and the way out."""


def unpack_wheels(folder: Path, site: Path) -> list[str]:
    """Unpack into `site` what is whole in `folder` and not there yet; return one line for each wheel that is not taken.

    A package that this environment has already stays as it is: its torch decides, and a folder may hold another.
    """
    if not folder.is_dir():
        raise WheelError(f"no folder {folder}")
    wheels: dict[str, dict[int, Path]] = {}
    for file in sorted(folder.rglob("*.whl*")):
        name, number = (found[1], int(found[2])) if (found := PIECE.fullmatch(file.name)) else (file.name, 0)
        if name.endswith(".whl"):
            wheels.setdefault(name, {})[number] = file
    if not wheels:
        raise WheelError(f"there is no wheel in {folder}: neither NAME.whl nor its pieces NAME.whl.part00, ...")
    versions: dict[NormalizedName, str] = {}
    for name in wheels:
        package = parse_wheel_filename(name)[0]
        if package in versions:
            raise WheelError(f"{folder} has two wheels of one package; keep one: {versions[package]}, {name}")
        versions[package] = name
    here = {canonicalize_name(found.metadata["Name"]) for found in metadata.distributions()}
    tags = set(sys_tags())
    lines = []
    for package, name in versions.items():
        stamp, pieces = site / ".unpacked" / name, wheels[name]
        if stamp.exists() or package in here:
            continue
        if not parse_wheel_filename(name)[3] & tags:
            lines.append(f"{name} is for another Python or platform")
        elif _unpack([pieces.get(number) for number in range(max(pieces) + 1)], site):
            stamp.parent.mkdir(exist_ok=True)
            stamp.touch()
        else:
            lines.append(f"{name} is not whole: there are pieces {', '.join(map(str, sorted(pieces)))}")
    return lines


def _unpack(pieces: list[Path | None], site: Path) -> bool:
    """Unpack the wheel that the pieces make; return False where one is missing."""
    if None in pieces:
        return False
    site.mkdir(parents=True, exist_ok=True)
    joined = site / "joined.whl"
    with joined.open("wb") as whole:
        for piece in filter(None, pieces):
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole)
    try:
        if not zipfile.is_zipfile(joined):  # its last piece, which lists the files, is missing
            return False
        with zipfile.ZipFile(joined) as wheel:
            for item in wheel.infolist():
                data = re.fullmatch(r"[^/]+\.data/([^/]+)/(.+)", item.filename)
                if item.is_dir() or (data and data[1] not in ("purelib", "platlib", "data")):
                    continue
                target = site / (data[2] if data else item.filename)
                target.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(item) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
                target.chmod(0o755 if item.external_attr >> 16 & 0o111 else 0o644)
    finally:
        joined.unlink()
    return True


def package_needs() -> list[str]:
    """Return what this package depends on, without an engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"])


def find_missing(roots: Iterable[str], site: Path) -> list[str]:
    """Return the packages that `roots` need, directly or through others, and that are neither installed nor in
    `site`.
    """
    here: dict[str, metadata.Distribution] = {}
    for found in [*metadata.distributions(path=[str(site)]), *metadata.distributions()]:
        here.setdefault(canonicalize_name(found.metadata["Name"]), found)
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(root), "") for root in roots]
    while waiting:
        need, extra = waiting.pop()
        name = canonicalize_name(need.name)
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        if name not in here:
            missing.add(f"{need.name}{need.specifier}")
            continue
        for wanted in {"", *need.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in here[name].requires or ()]
    return sorted(missing, key=str.lower)


def how_to_bring(missing: Sequence[str], folder: Path) -> str:
    """Return the commands that download the missing wheels where there is a network."""
    platforms = dict.fromkeys(tag.platform for tag in sys_tags())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(f"'{name}'" for name in missing)
    return (
        f"export PIP_PLATFORM='{' '.join(platforms)}'\n"
        f"python -m pip download --no-deps --only-binary=:all: --implementation cp --python-version {version} "
        f"--dest {folder} {names}"
    )
