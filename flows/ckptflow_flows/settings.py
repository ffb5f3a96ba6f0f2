"""The parameters of the flows, as the forms of the Prefect UI show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ckptflow.errors import UsageError
from ckptflow.publish import several as places
from ckptflow.publish.settings import PublishSettings
from ckptflow.request import GB, ConvertRequest
from ckptflow.validate.verify import VerifyOptions
from ckptflow_flows.localcopy import check_local_copy
from ckptflow_tasks.credentials import BlockCredentials

# Parameters are stored by the server and shown to all who see the run: an address must not hold a password.
WITHOUT_PASSWORD = r"^[A-Za-z][A-Za-z0-9+.-]*://[^@/]*(/.*)?$"


class Section(BaseModel):
    """What the models here have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Recipe(Section):
    """What to make of a checkpoint."""

    dtype: Literal["bfloat16", "float16", "float32", "source"] = Field(
        "bfloat16", title="Dtype", description="Element type of the published weights; `source` keeps the trainer's."
    )
    keep_dtype: tuple[str, ...] = Field(
        (), title="Keep dtype", description="Patterns of tensor names that keep their dtype, such as `*.norm.weight`."
    )
    max_shard_bytes: int = Field(
        5 * GB, gt=0, title="Largest weight file", description="Most bytes of tensors in one weight file."
    )
    adapter: Literal["merge", "export"] | None = Field(
        None, title="LoRA", description="Fold adapters into the base weights, or publish them as a PEFT directory."
    )
    lora_alpha: float | None = Field(
        None, title="LoRA alpha", description="Only where the checkpoint does not tell it."
    )
    config_dir: Path | None = Field(
        None, title="Config", description="Directory with config.json and tokenizer, where the trainer left none."
    )
    base_model: Path | None = Field(None, title="Base model", description="Directory of an adapter's base model.")
    allow_nonfinite: bool = Field(
        False, title="Allow NaN and Inf", description="Publish weights that hold NaN or Inf instead of refusing them."
    )


class Machine(Section):
    """How to run; none of it changes a byte of the result."""

    work_dir: Path | None = Field(
        None,
        title="Work directory",
        description="Where the model is made before it is published; default: `.ckptflow` in the run directory.",
    )
    shrink_source: bool = Field(
        False,
        title="Shrink the checkpoint",
        description="First take unused storage out of the trainer's own torch files, in place, once they have settled.",
    )
    keep_local: bool = Field(False, title="Keep local copy", description="Leave the model in the work directory.")
    no_local_copy: bool = Field(
        False,
        title="No local copy",
        description="Send weight files to S3 while they are made, and prove them there; for one destination on S3.",
    )
    threads: int | None = Field(None, gt=0, title="Threads", description="Threads per weight file; default: cores.")
    memory_budget_bytes: int = Field(
        512 * 10**6, gt=0, title="Memory budget", description="Bound on the engine's buffers per weight file, in bytes."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", title="Device", description="Where to cast; `auto` takes an idle GPU from 32 GB on, else the CPU."
    )


class Validation(Section):
    """How the result is proven. Every element is always compared with the source."""

    forward: bool = Field(True, title="Forward pass", description="Load the model with transformers and run it.")
    forward_memory_bytes: int | None = Field(
        None, gt=0, title="Memory", description="Most bytes for the forward pass; default: half of what is free."
    )
    timeout_seconds: float = Field(
        1800.0, gt=0, title="Time limit", description="For loading the model and running it, in seconds."
    )


#: Of the fields below whose text has a form, in words.
FORMS = {
    "uri": "SCHEME://…, without a user name or password in it",
    "endpoint_url": "SCHEME://…, without a user name or password in it",
    "credentials_block": "secret/NAME or aws-credentials/NAME",
}


class Destination(Section):
    """Where models are published. Credentials come from the environment, the usual AWS and HF files, or a block.

    As text: the address, then ``,name=value`` for each setting that is not the default.
    """

    uri: str = Field(
        title="Destination",
        pattern=WITHOUT_PASSWORD,
        description="`file:///DIR`, `s3://BUCKET/PREFIX` or `hf://ORG/NAME`; `{run}`, `{step}` and `{role}` are filled "
        "in, else `/RUN/step-N` is appended (a branch of that name on the Hub).",
    )
    endpoint_url: str | None = Field(
        None,
        title="Endpoint",
        pattern=WITHOUT_PASSWORD,
        description="For S3 servers that aren't AWS, or another Hub; default: AWS_ENDPOINT_URL and HF_ENDPOINT.",
    )
    visibility: Literal["private", "public"] = Field(
        "private", title="Visibility", description="Of a repository on the Hub; one that is public already is refused."
    )
    license: str | None = Field(
        None, title="License", description="For the model card on the Hub, such as `apache-2.0`."
    )
    base_model_id: str | None = Field(
        None, title="Base model", description="For the model card on the Hub: the model that training began from."
    )
    verify: Literal["auto", "full", "size"] = Field(
        "auto", title="Read-back", description="How the copy at the destination is proven."
    )
    credentials_block: str | None = Field(
        None,
        title="Credentials block",
        pattern=r"^(secret|aws-credentials)/[a-z0-9-]+$",
        description="`secret/NAME` (a Hub token, or JSON with AWS_ACCESS_KEY_ID and so on) or `aws-credentials/NAME`; "
        "default: the environment and files of the process that publishes.",
    )
    attempts: int = Field(
        6, ge=1, title="Tries", description="Tries of one request before the step fails; then the step is tried again."
    )
    overwrite: bool = Field(False, title="Replace", description="Take the place of another model at the destination.")

    def publish_settings(self) -> PublishSettings:
        """The library's settings."""
        return PublishSettings(
            endpoint_url=self.endpoint_url,
            verify=self.verify,
            max_attempts=self.attempts,
            visibility=self.visibility,
            license=self.license,
            base_model_id=self.base_model_id,
            credentials=None if self.credentials_block is None else BlockCredentials(self.credentials_block),
        )

    def place(self) -> places.Destination:
        """The library's destination."""
        return places.Destination(uri=self.uri, settings=self.publish_settings(), overwrite=self.overwrite)

    @classmethod
    def from_text(cls, text: str) -> Destination:
        """A destination of a command line or of a variable.

        Raises:
            UsageError: it is not one. The text is not shown: it may hold a password.
        """
        names = "|".join(name for name in cls.model_fields if name != "uri")
        uri, *rest = re.split(rf",({names})=", text)
        try:
            return cls.model_validate({"uri": uri, **dict(zip(rest[::2], rest[1::2], strict=True))}, strict=False)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise UsageError(
                f"{'.'.join(str(part) for part in first['loc'])} of a destination is refused",
                expected=FORMS[str(first["loc"][0])] if first["type"] == "string_pattern_mismatch" else first["msg"],
                fix="file:///DIR, s3://BUCKET/PREFIX or hf://ORG/NAME, and ,NAME=VALUE for each further setting",
            ) from None


#: As a list, or as one text with spaces between, which is what a variable of a deployment can hold.
Destinations = Annotated[
    list[Destination] | str,
    Field(title="Destinations", description="Where models are published; as one text they are separated by spaces."),
]


def destinations_of(destinations: Sequence[Destination] | str) -> tuple[Destination, ...]:
    """The destinations of a list or text.

    Raises:
        UsageError: one is none or is named twice, or there is none at all.
    """
    if isinstance(destinations, str):
        destinations = [Destination.from_text(text) for text in destinations.split()]
    places.check_each_once([destination.uri for destination in destinations])
    return tuple(destinations)


def _each_once(destinations: tuple[Destination, ...]) -> tuple[Destination, ...]:
    try:
        return destinations_of(destinations)
    except UsageError as error:
        raise ValueError(str(error)) from error


#: What a run publishes to.
Places = Annotated[
    tuple[Destination, ...],
    AfterValidator(_each_once),
    Field(
        title="Destinations",
        min_length=1,
        description="Where the model is published; each for itself: one that fails does not keep it from the others.",
    ),
]


Checked = TypeVar("Checked", bound=Section)


def with_local_copy_checked(section: Checked, machine: Machine, destinations: Sequence[Destination]) -> Checked:
    """The section, where machine and destinations in it go together.

    Raises:
        ValueError: they don't.
    """
    uris = [destination.uri for destination in destinations]
    try:
        check_local_copy(uris, keep_local=machine.keep_local, no_local_copy=machine.no_local_copy)
    except UsageError as error:
        raise ValueError(str(error)) from error
    return section


class PostTraining(Section):
    """One checkpoint, from the trainer's files to a published model."""

    path: Path = Field(title="Checkpoint", description="The checkpoint, its step directory, or a run with one step.")
    destinations: Places
    recipe: Recipe = Field(default_factory=Recipe, title="Recipe")
    machine: Machine = Field(default_factory=Machine, title="Machine")
    validation: Validation = Field(default_factory=Validation, title="Validation")

    @model_validator(mode="after")
    def _check_local_copy(self) -> Self:
        return with_local_copy_checked(self, self.machine, self.destinations)

    def verify_options(self) -> VerifyOptions:
        """How to prove the result."""
        return VerifyOptions(
            forward_memory_bytes=self.validation.forward_memory_bytes,
            timeout_seconds=self.validation.timeout_seconds,
            config_dir=self.recipe.config_dir,
            base_model=self.recipe.base_model,
            threads=self.machine.threads,
        )

    def convert_request(self, out: Path) -> ConvertRequest:
        """The conversion that this asks for, made at ``out``."""
        recipe, machine = self.recipe, self.machine
        return ConvertRequest(
            path=self.path,
            out=out,
            dtype=recipe.dtype,
            keep_dtype=recipe.keep_dtype,
            max_shard_bytes=recipe.max_shard_bytes,
            config_dir=recipe.config_dir,
            base_model=recipe.base_model,
            adapter=recipe.adapter,
            lora_alpha=recipe.lora_alpha,
            allow_nonfinite=recipe.allow_nonfinite,
            overwrite=True,
            threads=machine.threads,
            memory_budget_bytes=machine.memory_budget_bytes,
            device=machine.device,
        )
