#!/usr/bin/env python3
"""Make a smaller model of a Hugging Face folder: its first layers, with embeddings, last norm and tokenizer.

    python tools/first_layers.py models/Qwen2.5-0.5B-Instruct --layers 8 --out models/first_eight

For trying two roles where two whole models do not fit. What it writes is a valid folder of real weights, and no
longer a language model of any use.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file


def main() -> None:
    """Copy tensors whose layer is below the given number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    if not 0 < arguments.layers <= config["num_hidden_layers"]:
        parser.error(f"--layers: the model has {config['num_hidden_layers']}")
    config["num_hidden_layers"] = arguments.layers
    config.pop("layer_types", None)
    arguments.out.mkdir(parents=True)
    tensors = {}
    for file in sorted(arguments.model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                layer = re.match(r"model\.layers\.(\d+)\.", name)
                if layer is None or int(layer.group(1)) < arguments.layers:
                    tensors[name] = handle.get_tensor(name)
    save_file(tensors, arguments.out / "model.safetensors", metadata={"format": "pt"})
    for file in arguments.model.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in file.name:
            shutil.copy(file, arguments.out / file.name)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
