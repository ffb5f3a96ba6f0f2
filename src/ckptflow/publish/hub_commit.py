"""The one commit that publishes a model on the Hub: made once, found again where its answer was lost, and proven."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from ckptflow.errors import TransientPublishError
from ckptflow.publish import refusals
from ckptflow.publish.hub_card import CARD_NAME, MADE_HERE
from ckptflow.publish.hub_client import HubCaller
from ckptflow.publish.hub_errors import HUB_FAILURES, judge
from ckptflow.publish.hub_files import Addition, Staged, TreeFile
from ckptflow.publish.hub_repo import HubRepo, Tree, is_refused_parent
from ckptflow.publish.model import MARKER_NAME, LocalModel
from ckptflow.publish.settings import PublishSettings

#: What the Hub itself puts into a repository, which is no part of a model.
_HOUSEKEEPING = frozenset({".gitattributes", ".gitignore"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """What is on the branch now, and whether this run put it there."""

    tree: Tree
    is_ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCommit:
    """Makes one commit. ``desired`` are all files that it is to have, but for the hidden ones, which stay."""

    caller: HubCaller
    repo: HubRepo
    uri: str
    settings: PublishSettings
    model: LocalModel
    desired: Mapping[str, Staged | TreeFile]
    card: Staged | None
    #: In the commit's message, so that it is known again.
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def make(self, base: Tree, *, has_branch: bool) -> Landed:
        """Commit on top of ``base``, prove what the commit holds, and tag it where a tag is wanted.

        Raises:
            TransientPublishError: the branch changed meanwhile, or the commit does not hold what was sent.
        """
        # Hours may have passed since the first look.
        self.repo.open(self.settings.visibility)
        if not has_branch:
            self.repo.create_branch(base.commit)
        landed = self._land(base)
        if landed.is_ours:
            self._prove(landed.tree)
        if self._is_marker_right(landed.tree):
            # Of another run's commit too: that run may have died before it came to the tag.
            self._tag(landed.tree)
        return landed

    def _land(self, base: Tree) -> Landed:
        attempt = 1
        while operations := self._operations(base):
            try:
                found: str | Tree | None = self._send(operations, base)
            except HUB_FAILURES as error:
                found = self._settle(error, base, attempt)
            if isinstance(found, Tree):
                base, attempt = found, attempt + 1
                continue
            head = self._head() if found is None else None
            commit = found if head is None else self.repo.find_commit(head.commit, self.token)
            if commit is None:
                return Landed(tree=head or base, is_ours=False)
            return Landed(tree=self.repo.tree(commit), is_ours=True)
        return Landed(tree=base, is_ours=True)

    def _operations(self, base: Tree) -> list[CommitOperationAdd | CommitOperationDelete]:
        """What makes ``base`` the desired tree; additions are in the order of sending."""
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationDelete(path_in_repo=name, is_folder=False)
            for name in base.files
            if name not in self.desired and not is_hidden(name, self.model)
        ]
        for name, wanted in self.desired.items():
            if isinstance(wanted, Staged) and not wanted.is_in(base.files.get(name)):
                operations.append(Addition(name, wanted))
        if operations and self._is_card_due(base) and self.card is not None:
            operations.insert(0, Addition(CARD_NAME, self.card))
        return operations

    def _is_card_due(self, base: Tree) -> bool:
        """Whether our card is to be written: not over one that a person wrote."""
        there = base.files.get(CARD_NAME)
        if there is None or base.commit is None or self.card is None:
            return True
        return not self.card.is_in(there) and MADE_HERE.encode() in (self.repo.read(base.commit, CARD_NAME) or b"")

    def _send(self, operations: list[CommitOperationAdd | CommitOperationDelete], base: Tree) -> str | None:
        step = self.model.global_step
        return self.repo.commit(
            operations,
            parent=base.commit,
            title="Publish a model" if step is None else f"Publish the model of step {step}",
            message=f"Fingerprint: {self.model.marker.fingerprint}\nUpload: {self.token}",
        )

    def _settle(self, error: Exception, base: Tree, attempt: int) -> str | Tree | None:
        """After a commit that failed, or of which the answer was lost.

        Returns:
            The id of our commit, where it is there after all; the tree to try again on; None where somebody else
            published a model meanwhile.
        """
        head = self._head()
        if head.commit != base.commit:
            ours = self.repo.find_commit(head.commit, self.token)
            if ours is not None:
                _log.info("%s: the commit %s was made, though its answer was lost", self.uri, ours)
                return ours
            if head.files.get(MARKER_NAME) != base.files.get(MARKER_NAME):
                return None
            if self._visible(head) != self._visible(base):
                raise refusals.disturbed(self.uri, f"commit {head.commit}, which changes files") from error
        verdict = judge(error)
        may_heal = verdict.may_heal or is_refused_parent(error)
        if not may_heal or attempt >= self.settings.max_attempts:
            raise self.caller.final_error(error, "can't commit", self.repo.where) from None
        if not is_refused_parent(error) or head.commit == base.commit:
            self.caller.wait(attempt, error, self.repo.where)
        return head

    def _head(self) -> Tree:
        return self.repo.tree(self.repo.heads()[0].get(self.repo.address.branch))

    def _visible(self, tree: Tree) -> dict[str, TreeFile]:
        return {name: found for name, found in tree.files.items() if not is_hidden(name, self.model)}

    def _prove(self, tree: Tree) -> None:
        """Compare each file of the commit with what was sent; take the marker away where they differ."""
        bad = [name for name, wanted in self.desired.items() if not self._is_right(name, wanted, tree)]
        bad += sorted(set(self._visible(tree)) - set(self.desired))
        if not bad and self._is_marker_right(tree):
            return
        names = ", ".join(bad[:5]) or MARKER_NAME
        try:
            self.repo.commit(
                [CommitOperationDelete(path_in_repo=MARKER_NAME, is_folder=False)],
                parent=tree.commit,
                title="Withdraw a model",
                message=f"Not as sent: {names}",
            )
        except HUB_FAILURES as error:
            _log.warning("%s: the marker can't be taken away: %s", self.uri, judge(error).found)
        raise TransientPublishError(
            "the commit does not hold what was sent",
            file=self.uri,
            found=names,
            fix="run it again; if it comes back, look for a .gitignore in the repository that leaves these files out",
        )

    def _is_right(self, name: str, wanted: Staged | TreeFile, tree: Tree) -> bool:
        found = tree.files.get(name)
        if isinstance(wanted, TreeFile):
            return wanted == found
        if not wanted.is_in(found) or self.settings.verify != "full" or tree.commit is None:
            return wanted.is_in(found)
        return self.repo.read_sha256(tree.commit, name, wanted.nbytes) == wanted.sha256

    def _is_marker_right(self, tree: Tree) -> bool:
        return tree.commit is not None and self.repo.read(tree.commit, MARKER_NAME) == self.model.marker_content

    def _tag(self, tree: Tree) -> None:
        tag = self.repo.address.tag
        if tag is not None and tree.commit is not None and not self.repo.create_tag(tree.commit):
            raise refusals.overtaken(self.uri, f"tag {tag} on another commit")


def is_hidden(name: str, model: LocalModel | None) -> bool:
    """Whether a file of a repository is no part of the model: the Hub's own, and a card that is not the model's."""
    if name == CARD_NAME:
        return model is None or CARD_NAME not in model.marker.files
    return name in _HOUSEKEEPING
