"""Several destinations in one run: each has its own state, and one that fails undoes no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptflow.errors import PermanentPublishError, TransientPublishError, UsageError, VerificationError
from ckptflow.publish import Destination, DestinationOutcome, PublishSettings, publish_all
from ckptflow.publish.credentials import Credentials, credentials_named
from ckptflow.publish.several import told_in_words
from publishing import HubRepo, contents_of, write_model
from servers.hub import TOKEN, Fault, running_hub

FAST = PublishSettings(max_attempts=2, backoff_seconds=0.01)


def test_each_destination_has_its_own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, places = write_model(tmp_path / "out"), [tmp_path / "first", tmp_path / "taken", tmp_path / "last"]
    places[1].mkdir()
    (places[1] / "weights.bin").write_bytes(b"a stranger's")
    with running_hub(tmp_path / "hub") as hub:
        for name, value in hub.environment().items():
            monkeypatch.setenv(name, value)
        hub.interfere = lambda request: Fault(status=503) if "/commit/" in request.path else None
        store = HubRepo(hub=hub)
        wanted = [Destination(uri=uri, settings=FAST) for uri in (places[0].as_uri(), store.uri)]
        wanted += [Destination(uri=place.as_uri(), settings=FAST) for place in places[1:]]
        outcomes = publish_all(model, wanted)
        assert [(o.uri, o.state, o.may_heal) for o in outcomes] == [
            (wanted[0].uri, "published", False),
            (wanted[1].uri, "failed", True),
            (wanted[2].uri, "failed", False),
            (wanted[3].uri, "published", False),
        ]
        assert isinstance(outcomes[1].error, TransientPublishError)
        assert isinstance(outcomes[2].error, PermanentPublishError)
        assert contents_of(places[0]) == contents_of(places[2]) == contents_of(model)
        hub.interfere = None
        again = publish_all(model, wanted)
        assert [o.record and o.record.already_published for o in again] == [True, False, None, True]
        assert store.read_all() == contents_of(model)


def test_progress_is_told_for_each(tmp_path: Path) -> None:
    done: dict[str, list[int]] = {}
    places = [Destination(uri=(tmp_path / name).as_uri()) for name in ("a", "b")]
    outcomes = publish_all(write_model(tmp_path / "out"), places, progress=lambda uri: done.setdefault(uri, []).append)
    assert [sum(done[o.uri]) for o in outcomes] == [o.record.total_bytes for o in outcomes if o.record]


def test_a_model_that_is_not_one_goes_nowhere(tmp_path: Path) -> None:
    model = write_model(tmp_path / "out")
    (model / "config.json").unlink()
    with pytest.raises(VerificationError):
        publish_all(model, [Destination(uri=(tmp_path / "a").as_uri())])
    assert not (tmp_path / "a").exists()


def test_a_destination_is_named_once(tmp_path: Path) -> None:
    place = Destination(uri=(tmp_path / "a").as_uri())
    with pytest.raises(UsageError, match="once"):
        publish_all(write_model(tmp_path / "out"), [place, place])


def test_all_destinations_in_one_sentence(tmp_path: Path) -> None:
    outcomes = [
        DestinationOutcome(uri="s3://a", error=PermanentPublishError("refused", fix="ask")),
        DestinationOutcome(uri="hf://b/c"),
        DestinationOutcome(uri="file:///d", error=TimeoutError()),
    ]
    assert told_in_words("my-run step-1", outcomes) == (
        "my-run step-1 is not published at s3://a (refused; what to do: ask), nor at file:///d (TimeoutError); "
        "it is published at hf://b/c"
    )


class TestCredentials:
    def test_they_are_asked_for_when_a_connection_is_opened_and_shown_nowhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def give() -> Credentials:
            asked.append("once more")
            return Credentials(hub_token=TOKEN)

        with running_hub(tmp_path / "hub") as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
            monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
            monkeypatch.setenv("HF_TOKEN", "hf_ofSomebodyElse")
            settings = PublishSettings(max_attempts=1, credentials=give)
            (outcome,) = publish_all(
                write_model(tmp_path / "out"), [Destination(uri="hf://tester/own", settings=settings)]
            )
            assert outcome.state == "published", outcome.error
            assert asked == ["once more"]
            assert {request.headers.get("authorization") for request in hub.requests} <= {None, f"Bearer {TOKEN}"}
        at_hand = settings.with_credentials_at_hand()
        assert at_hand.credentials is not None
        assert TOKEN not in repr((at_hand, at_hand.credentials, at_hand.credentials()))

    def test_a_store_that_finds_none_of_its_own_does_not_look_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
        model = write_model(tmp_path / "out")
        for uri, given in (
            ("hf://tester/own", Credentials(access_key_id="a", secret_access_key="b")),
            ("s3://bucket/own", Credentials(hub_token="t")),
        ):
            settings = PublishSettings(credentials=lambda given=given: given)  # type: ignore[misc]
            (outcome,) = publish_all(model, [Destination(uri=uri, settings=settings)])
            assert isinstance(outcome.error, PermanentPublishError)
            assert "credentials that are named for this destination hold no" in outcome.error.what

    def test_their_usual_names_are_taken_and_others_refused_without_being_shown(self) -> None:
        given = credentials_named({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "r"}, "here")
        assert given == Credentials(access_key_id="a", secret_access_key="b", region="r")
        for values in ({}, {"HF_TOKEN": ""}, {"hf_tokenInTheWrongPlace": "x"}, {"HF_TOKEN": 5}):
            with pytest.raises(PermanentPublishError) as raised:
                credentials_named(values, "here")
            assert "hf_tokenInTheWrongPlace" not in str(raised.value)
