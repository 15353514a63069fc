"""The live weights of one rank's vLLM shard: where to write them, how to install them, how to read them back.

On a GPU vLLM computes with the parameters themselves, so writing into them is all there is. On a CPU it packs linear
weights into the layout of its kernels and leaves the parameters empty. There a module is restored to checkpoint
format with vLLM's own layerwise-reload parts (`vllm.model_executor.model_loader.reload`), filled, and processed again
by its quantisation method; one module at a time, so that at most one unpacked copy of a module's shard exists beyond
those that are still being received.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

_READ_ROWS = 256  # rows of the identity matrix multiplied at once


class EngineWeights:
    """Parameters of a vLLM model by name; a *module* is what owns some of them and is installed as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._info_of = get_layerwise_info
        self._modules = dict(model.named_modules())
        self._names = [name for name, _ in model.named_parameters()]
        # On a CPU, kernels hold packed copies. Those of the output layer may be of a weight that the embedding owns;
        # the embedding's own packed copy is never computed with.
        self._packed: dict[str, list[torch.nn.Module]] = defaultdict(list)
        owner_of = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        for module in self._modules.values():
            if hasattr(module, "cpu_linear") and (module is model.lm_head or isinstance(module, LinearBase)):
                owner = owner_of[id(module.weight)]
                self._packed[owner].append(module)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shape of every parameter, also of those that are packed away."""
        return {name: tuple(self._checkpoint_tensor(name).shape) for name in self._names}

    def open(self, module_name: str) -> None:
        """Make the module's parameters writable."""
        module = self._modules[module_name]
        if any(parameter.numel() == 0 for parameter in module.parameters(recurse=False)):
            from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta

            info = self._info_of(module)
            restore_layer_on_meta(module, info)
            materialize_layer(module, info)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the parameter to write into; its module must be open."""
        module_name, _, attribute = name.rpartition(".")
        return getattr(self._modules[module_name], attribute).data

    @torch.no_grad()
    def close(self, module_name: str) -> None:
        """Put what was written to use: pack it where the kernels want it packed."""
        for module in self._packed.get(module_name, ()):
            module.quant_method.process_weights_after_loading(module)

    @torch.no_grad()
    def copies(self, name: str) -> Iterator[torch.Tensor]:
        """Yield every copy of a parameter that the engine computes with, in checkpoint layout.

        Packed weights are read through their kernel: the product with the identity matrix is the transposed weight,
        exactly, since each output is one weight times 1 plus zeros. Only a negative zero comes back as a positive.
        """
        module_name, _, attribute = name.rpartition(".")
        live = self.tensor(name)
        if live.numel():
            yield live
        if attribute != "weight":
            return
        columns = self._checkpoint_tensor(name).shape[1:]
        for module in self._packed.get(module_name, ()):
            parts = []
            for start in range(0, columns[0], _READ_ROWS):
                rows = torch.arange(min(_READ_ROWS, columns[0] - start))
                identity = torch.zeros(len(rows), columns[0], dtype=self._checkpoint_tensor(name).dtype)
                identity[rows, rows + start] = 1
                parts.append(module.quant_method.apply(module, identity, None))
            yield torch.cat(parts).t()

    def _checkpoint_tensor(self, name: str) -> torch.Tensor:
        """Return the parameter in checkpoint format: itself, or the record that vLLM keeps of one that it has
        emptied.
        """
        live = self.tensor(name)
        if live.numel():
            return live
        module_name, _, attribute = name.rpartition(".")
        return self._info_of(self._modules[module_name]).restore_metadata[0][attribute]
