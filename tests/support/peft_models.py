"""A tiny model with an adapter that PEFT made and trained, saved in both ways in which checkpoints hold it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from deepspeed_writer import write_zero2
from rank_writer import rank_name


class Tiny(nn.Module):
    """One layer of each kind that PEFT adapts; ``square`` and ``turned_square`` look alike from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.up = nn.Linear(4, 6)
        self.square = nn.Linear(6, 6, bias=False)
        self.turned = Conv1D(3, 6)
        self.conv = nn.Conv2d(2, 3, (2, 3))
        self.head = nn.Linear(6, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Only there because PEFT wants one."""
        return self.head(self.square(self.up(self.embed(ids))))


def tiny() -> Tiny:
    """The base, the same each time."""
    torch.manual_seed(5)
    return Tiny()


def trained(**options: Any) -> PeftModel:
    """A wrapped model whose adapter does something."""
    facts = {"r": 2, "lora_alpha": 6, "target_modules": ["up", "square"]}
    model = get_peft_model(tiny(), LoraConfig(**{**facts, **options}))
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + (2.0 if "magnitude" in name else 0.0))
    return model


def save_apart(model: PeftModel, directory: Path) -> Path:
    """Adapter directory and base directory, side by side."""
    (directory / "base").mkdir()
    save_file(dict(tiny().state_dict()), directory / "base" / "model.safetensors")
    model.save_pretrained(directory / "adapter", save_embedding_layers=False)
    config = directory / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "base"}))
    return directory / "adapter"


def save_wrapped(model: PeftModel, directory: Path) -> Path:
    """The live model's state dict in a rank file, and its config where verl puts it."""
    torch.save(model.state_dict(), directory / rank_name(1, 0))
    model.peft_config["default"].save_pretrained(directory / "lora_adapter")
    return directory


def save_without_frozen(model: PeftModel, directory: Path) -> Path:
    """What the Trainer leaves of a run with DeepSpeed: masters of what was trained, beside PEFT's own files."""
    adapter = save_apart(model, directory)
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    write_zero2(adapter, [trained], 2)
    return adapter


def save_beside_fsdp1(model: PeftModel, directory: Path) -> Path:
    """The Trainer's step with FSDP1 and full state dicts: PEFT's files, and Accelerate's with the adapter alone.

    See ``save_fsdp_model`` with ``adapter_only`` in accelerate/utils/fsdp_utils.py.
    """
    adapter = save_apart(model, directory)
    torch.save(_saved_by_peft(model), adapter / "pytorch_model_fsdp.bin")
    return adapter


def save_beside_fsdp2(model: PeftModel, directory: Path) -> Path:
    """The same with FSDP2, whose full state dict has the live names of what is trained."""
    adapter = save_apart(model, directory)
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    torch.save(trained, adapter / "pytorch_model_fsdp.bin")
    return adapter


def save_beside_dcp(model: PeftModel, directory: Path) -> Path:
    """The Trainer's step with sharded state dicts, into which a callback had PEFT save the adapter too."""
    adapter = save_apart(model, directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        dcp.save({"model": _saved_by_peft(model)}, checkpoint_id=adapter / "pytorch_model_fsdp_0", no_dist=True)
    return adapter


def _saved_by_peft(model: PeftModel) -> dict[str, torch.Tensor]:
    return get_peft_model_state_dict(model, save_embedding_layers=False)
