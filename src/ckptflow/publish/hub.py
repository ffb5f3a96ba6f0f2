"""``hf://ORG/NAME[@BRANCH]``: a model repository on the Hugging Face Hub.

A Hub shows what a commit holds, all at once. So files are sent first, where no reader sees them, and one commit makes
the whole model appear; until then this target keeps the changes, and shows them to its own caller as if they were made.
"""

from __future__ import annotations

from collections.abc import Mapping

from huggingface_hub import HfApi

from ckptflow.errors import PermanentPublishError
from ckptflow.publish.hub_card import CARD_NAME, check_card, check_card_options, make_card
from ckptflow.publish.hub_client import HubCaller
from ckptflow.publish.hub_commit import HubCommit, is_hidden
from ckptflow.publish.hub_files import Addition, Staged, TreeFile, check_file
from ckptflow.publish.hub_repo import EMPTY, HubRepo, Tree, parse_uri
from ckptflow.publish.model import MARKER_NAME, LocalFile, LocalModel
from ckptflow.publish.settings import PublishSettings
from ckptflow.publish.targets import Progress

#: huggingface_hub itself tries each request of a transfer six times.
_TRANSFER_ATTEMPTS = 2


class HubTarget:
    """A branch, or a tag, of a model repository as a destination.

    ``_base`` is the commit that ours goes on top of, ``_shown`` what a reader finds at the destination, ``_staged``
    the changes that wait for the commit: None takes a file away.
    """

    large_files_at_once = 1

    def __init__(self, uri: str, settings: PublishSettings) -> None:
        self._uri = uri
        self._settings = settings
        self._address = parse_uri(uri)
        self._caller = HubCaller(settings)
        self._repo = HubRepo(caller=self._caller, address=self._address)
        self._base: Tree | None = None
        self._shown: Mapping[str, TreeFile] = {}
        self._has_branch = False
        self._staged: dict[str, Staged | None] = {}
        self._known: dict[str, Staged] = {}
        self._model: LocalModel | None = None
        self._card: Staged | None = None

    @property
    def uri(self) -> str:
        """The destination as it was given."""
        return self._uri

    @property
    def revision(self) -> str | None:
        """The commit that was looked at last."""
        return None if self._base is None else self._base.commit

    def close(self) -> None:
        """The connections are the process's, not this target's."""

    def prepare(self, model: LocalModel) -> None:
        """Make or check the card, then make sure of the repository and who can read it; no file is sent before."""
        self._model = model
        settings, address = self._settings, self._address
        self._caller.check_token()
        card = make_card(
            model, address.repo_id, address.tag or address.branch, settings.license, settings.base_model_id
        )
        own = next((file for file in model.files if file.name == CARD_NAME), None)
        if own is None:
            self._card = Staged.of_bytes(card)
        else:
            card = own.path.read_bytes()
            check_card(card, str(own.path))
        self._repo.check_card(card)
        self._repo.open(settings.visibility)
        self._load()

    def check_rights(self) -> None:
        """Ask whether the token may write, and who could read; a repository that is not there is not made yet."""
        self._caller.check_token()
        check_card_options(self._settings.license, self._settings.base_model_id)
        self._repo.check(self._settings.visibility)

    def list_files(self) -> dict[str, str]:
        """Name → a tag of the content; what is staged counts as there."""
        self._load()
        tags = {name: self._tag(name, found) for name, found in self._shown.items() if not self._is_hidden(name)}
        for name, staged in self._staged.items():
            tags.pop(name, None)
            if staged is not None:
                tags[name] = staged.sha256
        return tags

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file, or None."""
        base = self._load()
        if name in self._staged:
            return _content(self._staged[name])
        if name not in self._shown or base.commit is None:
            return None
        return self._repo.read(base.commit, name)

    def put_bytes(self, name: str, content: bytes) -> bool:
        """Stage a small file; the marker makes the commit."""
        if self._is_there(name):
            return False
        self._stage(name, Staged.of_bytes(content))
        if name != MARKER_NAME or self._model is None:
            return True
        commit = HubCommit(
            caller=self._caller,
            repo=self._repo,
            uri=self._uri,
            settings=self._settings,
            model=self._model,
            desired=self._desired(),
            card=self._card,
        )
        landed = commit.make(self._load(), has_branch=self._has_branch)
        self._base, self._shown, self._has_branch = landed.tree, landed.tree.files, True
        self._staged = {}
        return landed.is_ours

    def put_file(self, file: LocalFile, progress: Progress) -> bool:
        """Send a large file to where no reader sees it, and stage it. False: the Hub has its content already."""
        if self._is_there(file.name):
            return False
        before = file.path.stat().st_mtime_ns if file.path.exists() else 0
        staged = Staged.of_file(file)
        is_sent = self._send(file.name, staged, progress)
        if not isinstance(staged.source, bytes) and file.path.stat().st_mtime_ns != before:
            check_file(file)
        self._stage(file.name, staged)
        return is_sent

    def prove_file(self, file: LocalFile) -> str | None:
        """By the hash in the commit's tree, or the sha256 of the bytes read back.

        What is staged is proven when the commit was made, before the upload is called published.
        """
        base = self._load()
        if file.name in self._staged:
            return None if self._staged[file.name] is None else self._proof
        found = self._shown.get(file.name)
        if found is None or found.nbytes != file.bytes or found.sha256 not in (None, file.sha256):
            return None
        if (found.sha256 is None or self._settings.verify != "size") and not Staged.of_file(file).is_in(found):
            return None
        if self._settings.verify == "full" and base.commit is not None:
            return self._proof if self._repo.read_sha256(base.commit, file.name, file.bytes) == file.sha256 else None
        return self._proof

    def delete_file(self, name: str) -> None:
        """Stage a removal."""
        if self._is_there(name):
            self._staged[name] = None

    def tidy_file(self, name: str) -> None:
        """Nothing half is kept there."""

    @property
    def _proof(self) -> str:
        return "sha256 read back" if self._settings.verify == "full" else "size and hash in the commit"

    def _load(self) -> Tree:
        if self._base is None:
            branches, tags = self._repo.heads()
            head, tagged = branches.get(self._address.branch), tags.get(self._address.tag or "")
            self._has_branch = head is not None
            if tagged or head:
                self._base = self._repo.tree(tagged or head)
                self._shown = self._base.files
                self._check_tag(tagged)
            else:
                # A new branch would show what main has, another model perhaps: it starts from where nothing was.
                self._base = self._repo.tree(self._repo.first_commit()) if branches else EMPTY
        return self._base

    def _check_tag(self, tagged: str | None) -> None:
        if self._address.tag is None:
            return
        mine = None if self._model is None else self._model.marker_content
        content = self.read_file(MARKER_NAME)
        if tagged and mine not in (None, content):
            raise PermanentPublishError(
                "the tag is on another commit, and tags don't move",
                file=self._uri,
                expected=f"no tag {self._address.tag}, or one on this model",
                found=f"commit {tagged}",
                fix="choose another tag",
            )
        if not tagged and mine in (None, content):
            # A run that was killed between the commit and the tag: not published before the tag is there.
            self._shown = {name: found for name, found in self._shown.items() if name != MARKER_NAME}

    def _stage(self, name: str, staged: Staged) -> None:
        self._staged[name] = staged
        self._known[name] = staged

    def _send(self, name: str, staged: Staged, progress: Progress) -> bool:
        revision = self._address.branch if self._has_branch else None

        def action(api: HfApi) -> bool:
            addition = Addition(name, staged, progress)
            api.preupload_lfs_files(
                self._address.repo_id, additions=[addition], revision=revision, num_threads=1, free_memory=False
            )
            # A regular file goes with the commit. Xet does not say how much of a file it had already.
            is_lfs = addition._upload_mode == "lfs"
            return addition.sent_bytes > 0 or not is_lfs or self._caller.uses_xet

        return self._caller.run(
            action, what="can't send a file", where=f"{self._repo.where}: {name}", max_attempts=_TRANSFER_ATTEMPTS
        )

    def _desired(self) -> dict[str, Staged | TreeFile]:
        """All files that the commit is to have, but for what is hidden."""
        desired: dict[str, Staged | TreeFile] = {n: f for n, f in self._shown.items() if not self._is_hidden(n)}
        for name, staged in self._staged.items():
            desired.pop(name, None)
            if staged is not None:
                desired[name] = staged
        return desired

    def _is_there(self, name: str) -> bool:
        self._load()
        if name in self._staged:
            return self._staged[name] is not None
        return name in self._shown and not self._is_hidden(name)

    def _is_hidden(self, name: str) -> bool:
        return is_hidden(name, self._model)

    def _tag(self, name: str, found: TreeFile) -> str:
        known = self._known.get(name)
        return known.sha256 if known is not None and known.is_in(found) else found.tag


def _content(staged: Staged | None) -> bytes | None:
    if staged is None:
        return None
    return staged.source if isinstance(staged.source, bytes) else staged.source.read_bytes()
