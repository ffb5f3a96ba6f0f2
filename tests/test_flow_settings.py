"""Destinations as people write them: in lists, in one text, on a command line; wrong ones are told, secrets are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from ckptflow.cli import main
from ckptflow.errors import UsageError
from ckptflow_flows.settings import Destination, Destinations, PostTraining, destinations_of
from ckptflow_tasks.credentials import BlockCredentials


def test_settings_follow_the_address() -> None:
    text = "hf://org/name@a,b,credentials_block=secret/hf-token,visibility=public,attempts=2,overwrite=true"
    destination = Destination.from_text(text)
    assert destination == Destination(
        uri="hf://org/name@a,b",
        credentials_block="secret/hf-token",
        visibility="public",
        attempts=2,
        overwrite=True,
    )
    place = destination.place()
    assert place.settings.credentials == BlockCredentials("secret/hf-token")
    assert (place.uri, place.overwrite, place.settings.max_attempts) == ("hf://org/name@a,b", True, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models", "uri of a destination"),
        ("s3://AKIA:hunter2@bucket/models", "uri of a destination"),
        ("s3://bucket,endpoint_url=http://AKIA:hunter2@host", "endpoint_url of a destination"),
        ("s3://bucket,credentials_block=hunter2", "credentials_block of a destination"),
        ("s3://bucket,attempts=none", "attempts of a destination"),
    ],
)
def test_what_is_none_is_refused_without_being_shown(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        destinations_of(f"file:///fine {text}")
    assert "hunter2" not in str(raised.value)
    assert "pattern" not in str(raised.value)


def test_one_text_or_a_list_say_the_same() -> None:
    forms = TypeAdapter(Destinations)
    listed = [{"uri": "s3://bucket/models"}, {"uri": "hf://org/name"}]
    texts = destinations_of(forms.validate_python("s3://bucket/models  hf://org/name"))
    assert texts == destinations_of(forms.validate_python(listed))
    assert [each.uri for each in texts] == ["s3://bucket/models", "hf://org/name"]


@pytest.mark.parametrize("uris", [(), ("s3://a/b", "s3://a/b/")])
def test_each_destination_is_named_once_and_one_at_least(uris: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="each destination once"):
        destinations_of(" ".join(uris))
    with pytest.raises(ValidationError):
        PostTraining.model_validate({"path": "/runs/a", "destinations": [{"uri": uri} for uri in uris]})


def test_deploy_refuses_what_a_variable_would_take_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["deploy", str(tmp_path), "--to", "file:///my models"]) == 2
    assert "%20" in capsys.readouterr().err
