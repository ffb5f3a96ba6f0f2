"""Where the config comes from: a directory, a file, or the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ckptflow.errors import UsageError
from ckptflow.formats.side_files import SIDE_FILES

HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@contextmanager
def config_directory(config: str) -> Iterator[Path]:
    """A directory with config.json and, where there are any, tokenizer files.

    Raises:
        UsageError: there is no config, neither here nor on the Hub.
    """
    path = Path(config)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError("no config.json in this directory", file=path)
        yield path
    elif path.is_file() and path.name == "config.json":
        yield path.absolute().parent
    elif path.is_file():
        with TemporaryDirectory(prefix="ckptflow-") as directory:
            (Path(directory) / "config.json").write_bytes(path.read_bytes())
            yield Path(directory)
    else:
        yield _from_hub(config)


def _from_hub(config: str) -> Path:
    name = HUB_NAME.fullmatch(config)
    if name is None or config.startswith((".", "/", "~")):
        raise UsageError(
            "no such config", file=config, expected="a directory, a config file, or ORG/NAME[@REVISION] on the Hub"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise UsageError("a Hub name needs huggingface_hub", fix="pip install 'ckptflow[hub]'") from error
    wanted = [pattern for pattern in SIDE_FILES if not pattern.endswith(".py")]
    try:
        found = snapshot_download(name["repo"], revision=name["revision"], allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(
            "no such directory here, and the Hub gives no such model",
            file=config,
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="check the path or name; for a gated model, log in with `hf auth login`",
        ) from error
    directory = Path(found)
    if not (directory / "config.json").is_file():
        raise UsageError("this Hub repository has no config.json", file=config)
    return directory
