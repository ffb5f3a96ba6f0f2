"""What sentence-transformers puts around a transformers model: pooling, dense layers, and the list of them.

Without these files it loads the model with mean pooling, whatever it was trained with: embeddings would be wrong and
nothing would say so. Layout: https://github.com/UKPLab/sentence-transformers (SentenceTransformer.save).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ckptflow.errors import UnsupportedCheckpointError
from ckptflow.formats.config_files import directory_names
from ckptflow.formats.files import checked_file, list_names

MODULES = "modules.json"
SETTINGS = re.compile(r"config_sentence_transformers\.json|sentence_\w+_config\.json")
MODULE_DIRECTORY = re.compile(r"\d+_\w+")
PICKLES = (".bin", ".pt", ".pth", ".pkl")
MAX_MODULE_BYTES = 256 * 1024 * 1024


def module_files(directory: Path, root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file to carry over, in name order; none where there is no ``modules.json``.

    Args:
        directory: where the model's weights and config.json lie.
        root: links may not lead out of it.

    Raises:
        UnsupportedCheckpointError: a module's weights are a pickle, or too large to be a module's.
        UnsafeFileError: a link leads out of ``root``.
    """
    names = list_names(directory)
    if MODULES not in names:
        return
    kept = [name for name in names if name == MODULES or SETTINGS.fullmatch(name)]
    for module in directory_names(directory):
        if MODULE_DIRECTORY.fullmatch(module):
            kept += [f"{module}/{name}" for name in list_names(directory / module)]
    for name in sorted(kept):
        file = checked_file(directory / name, root)
        if name.endswith(PICKLES) or file.nbytes > MAX_MODULE_BYTES:
            raise UnsupportedCheckpointError(
                "a module of sentence-transformers can't be carried over",
                file=file.path,
                expected=f"safetensors of at most {MAX_MODULE_BYTES} bytes, and settings",
                found=f"{file.nbytes} bytes" if file.nbytes > MAX_MODULE_BYTES else "a pickle",
                fix="load the model with sentence-transformers and save it in safetensors; to convert the transformers "
                "model alone, move modules.json away",
            )
        yield name, Path(file.path).read_bytes()
