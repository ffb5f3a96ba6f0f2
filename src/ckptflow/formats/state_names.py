"""What trainers call the parts of a training state that they save together."""

from __future__ import annotations

import re
from pathlib import Path

# What trainers call the dict that holds the weights, at any depth above it.
MODEL_NAMES = frozenset({"model", "module", "models", "network", "state_dict", "model_state_dict", "model_state"})
# Training state that is never weights, and what it is.
STATE_NAMES = {
    "optim": "optimizer state",
    "optimizer": "optimizer state",
    "optimizers": "optimizer state",
    "optimizer_states": "optimizer state",
    "optimizer_state_dict": "optimizer state",
    "lr_scheduler": "learning rate schedule",
    "lr_schedulers": "learning rate schedule",
    "scheduler": "learning rate schedule",
    "dataloader": "position in the training data",
    "dataset": "position in the training data",
    "train_state": "training counters",
    "trainer_state": "training counters",
    "grad_scaler": "loss scale",
    "scaler": "loss scale",
    "ema": "moving average of the weights, not the weights themselves",
    "extra_state": "training state",
}
# Lightning numbers its optimizers: optimizer_0.
NUMBER = re.compile(r"_\d+$")
RNG_NAME = re.compile(r"(\w+_)?rng(_states?)?")
# The two parts of torch.optim's state dicts; nothing else has the second, whatever the dict around them is called.
OPTIMIZER_STATE, PARAM_GROUPS = "state", "param_groups"

# verl's and AReaL's directory of Megatron's save, in one that says what is in it: model/dist_ckpt, extra/dist_ckpt.
MEGATRON_DIRECTORY = "dist_ckpt"


def is_state_directory(directory: Path) -> bool:
    """Whether a directory's name says that it is a save of training state alone, beside the one of the model.

    An average of the weights is a model, and which one is meant is for people to say.
    """
    name = directory.name
    if name == MEGATRON_DIRECTORY:
        name = directory.parent.name
        if name == "extra":
            return True
    name = NUMBER.sub("", name)
    return name != "ema" and (name in STATE_NAMES or RNG_NAME.fullmatch(name) is not None)
