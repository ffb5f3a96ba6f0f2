"""One repository on the Hub: its visibility, its branches and tags, the files of a commit."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from ckptflow.errors import PermanentPublishError, UsageError
from ckptflow.publish.hub_client import HubCaller
from ckptflow.publish.hub_errors import status_of
from ckptflow.publish.hub_files import TreeFile
from ckptflow.publish.hub_rights import check_may_write
from ckptflow.publish.settings import MIB, Visibility

_URI = re.compile(r"hf://(?P<repo_id>[^/@]+/[^/@]+?)/?(?:@(?P<tag>tag:)?(?P<revision>.+))?")
# https://git-scm.com/docs/git-check-ref-format, and no 40 hex digits, which name a commit.
_BAD_REF = re.compile(r"[\x00-\x20~^:?*\[\\\x7f]|\.\.|@\{|//|^[/.-]|[/.]$|\.lock$|/\.|^refs/|^[0-9a-f]{40}$")
_RANGE_BYTES = 16 * MIB

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """What an ``hf://`` URI names; commits go to the branch, and ``tag``, where there is one, is put on the last."""

    repo_id: str
    branch: str
    tag: str | None


def parse_uri(uri: str) -> HubAddress:
    """``hf://ORG/NAME``, ``hf://ORG/NAME@BRANCH`` or ``hf://ORG/NAME@tag:TAG``.

    Raises:
        UsageError: it is none of these.
    """
    match = _URI.fullmatch(uri)
    revision = match["revision"] if match else None
    if match is None or (revision and _BAD_REF.search(revision)):
        raise UsageError(
            "not a repository on the Hub",
            expected="hf://ORG/NAME, hf://ORG/NAME@BRANCH or hf://ORG/NAME@tag:TAG",
            # "user:password@host" is a mistake that should not be repeated in a log.
            found=f"hf://…{uri.rpartition('@')[2]}" if ":" in uri.removeprefix("hf://").partition("@")[0] else uri,
            fix="for many models give {step} in the branch (…@{run}-{step}) or in the name (hf://ORG/NAME-{step})",
        )
    if match["tag"]:
        return HubAddress(repo_id=match["repo_id"], branch="main", tag=revision)
    return HubAddress(repo_id=match["repo_id"], branch=revision or "main", tag=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The files of one commit, which never change; ``commit`` is None where there is none."""

    commit: str | None
    files: Mapping[str, TreeFile]


EMPTY = Tree(commit=None, files={})


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """Requests about one repository."""

    caller: HubCaller
    address: HubAddress

    @property
    def repo_id(self) -> str:
        """``ORG/NAME``."""
        return self.address.repo_id

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.caller.endpoint}/{self.repo_id}"

    def open(self, visibility: Visibility) -> None:
        """Make sure that the repository is there and no more public than asked for.

        Raises:
            PermanentPublishError: it is public and private was asked for.
        """
        self.caller.check_token()
        is_private = self._is_private()
        if is_private is None:
            self.caller.run(
                lambda api: api.create_repo(self.repo_id, private=visibility == "private", exist_ok=True),
                what="can't create the repository",
                where=self.where,
            )
            is_private = self._is_private()
        self._check_visibility(is_private, visibility)

    def check(self, visibility: Visibility) -> None:
        """What ``open`` and a commit would refuse, as far as that is told without making anything.

        Raises:
            PermanentPublishError: it is public and private was asked for, or the token may not write.
        """
        is_private = self._is_private()
        if is_private is not None:
            self._check_visibility(is_private, visibility)
        check_may_write(self.caller, self.repo_id, is_there=is_private is not None)

    def _check_visibility(self, is_private: bool | None, visibility: Visibility) -> None:
        if not is_private and visibility == "private":
            raise PermanentPublishError(
                "the repository is public, and private was asked for",
                file=self.where,
                expected="a private repository",
                found="a public one" if is_private is False else "none that this token can see",
                fix="make it private in its settings, choose another name, or allow it with --public",
            )
        if is_private and visibility == "public":
            _log.warning("%s: the repository is private and stays so; publish it in its settings", self.where)

    def _is_private(self) -> bool | None:
        """None where there is no such repository, or none for this token."""
        try:
            info = self.caller.run(
                lambda api: api.repo_info(self.repo_id),
                what="can't look at the repository",
                where=self.where,
                passing=(RepositoryNotFoundError,),
            )
        except RepositoryNotFoundError:
            return None
        return bool(info.private)

    def heads(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Branches and tags, name → commit; none where there is no repository."""
        try:
            refs = self.caller.run(
                lambda api: api.list_repo_refs(self.repo_id),
                what="can't list branches and tags",
                where=self.where,
                passing=(RepositoryNotFoundError,),
            )
        except RepositoryNotFoundError:
            return {}, {}
        return {ref.name: ref.target_commit for ref in refs.branches}, {r.name: r.target_commit for r in refs.tags}

    def tree(self, commit: str | None) -> Tree:
        """The files of a commit."""
        if commit is None:
            return EMPTY

        def action(api: HfApi) -> dict[str, TreeFile]:
            entries = api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            return {
                entry.path: TreeFile(
                    nbytes=entry.size, oid=entry.blob_id, sha256=entry.lfs.sha256 if entry.lfs else None
                )
                for entry in entries
                if isinstance(entry, RepoFile)
            }

        files = self.caller.run(action, what="can't list the files", where=self.where, max_attempts=2)
        return Tree(commit=commit, files=files)

    def first_commit(self) -> str | None:
        """The commit that the Hub made with the repository: what a new branch starts from, so that it is empty."""
        commits = self.caller.run(
            lambda api: api.list_repo_commits(self.repo_id), what="can't list the commits", where=self.where
        )
        return commits[-1].commit_id if commits else None

    def create_branch(self, start: str | None) -> None:
        """Create the branch; nothing happens where it is there."""
        self.caller.run(
            lambda api: api.create_branch(self.repo_id, branch=self.address.branch, revision=start, exist_ok=True),
            what="can't create the branch",
            where=f"{self.where}@{self.address.branch}",
        )

    def create_tag(self, commit: str) -> bool:
        """Put the tag on a commit; False where there is one of that name on another commit."""
        tag = self.address.tag or ""
        self.caller.run(
            lambda api: api.create_tag(self.repo_id, tag=tag, revision=commit, exist_ok=True),
            what="can't create the tag",
            where=f"{self.where}@{tag}",
        )
        return self.heads()[1].get(tag) == commit

    def find_commit(self, head: str | None, words: str) -> str | None:
        """The newest commit with these words in its message, of ``head`` and those before it."""
        if head is None:
            return None
        commits = self.caller.run(
            lambda api: api.list_repo_commits(self.repo_id, revision=head),
            what="can't list the commits",
            where=self.where,
        )
        return next((each.commit_id for each in commits if words in f"{each.title}\n{each.message}"), None)

    def check_card(self, content: bytes) -> None:
        """Let the Hub look at a card, before anything is sent.

        Raises:
            PermanentPublishError: the Hub refuses it.
        """
        url = f"{self.caller.endpoint}/api/validate-yaml"
        body = {"content": content.decode(), "repoType": "model"}

        def action(api: HfApi) -> list[str]:
            response = get_session().post(url, json=body, headers=build_hf_headers(token=api.token))
            if response.status_code == 400:
                return [str(each.get("message")) for each in response.json().get("errors", [])]
            hf_raise_for_status(response)
            return []

        errors = self.caller.run(action, what="can't have the model card checked", where=self.where)
        if errors:
            raise PermanentPublishError(
                "the Hub refuses the model card",
                file=self.where,
                found="; ".join(errors),
                fix="correct --license and --base-model-id, or the front matter of README.md",
            )

    def commit(
        self,
        operations: Iterable[CommitOperationAdd | CommitOperationDelete],
        *,
        parent: str | None,
        title: str,
        message: str,
    ) -> str | None:
        """One commit, tried once: after a failure it may be there all the same.

        Returns:
            Its id; None where huggingface_hub made none, because somebody else's left nothing to change.
        """
        operations = list(operations)
        info = self.caller.api.create_commit(
            self.repo_id,
            operations=operations,
            commit_message=title,
            commit_description=message,
            revision=self.address.branch,
            parent_commit=parent,
        )
        additions = [each for each in operations if isinstance(each, CommitOperationAdd)]
        is_made = not additions or any(each._is_committed for each in additions)
        return str(info.oid) if is_made else None

    def read(self, commit: str, name: str) -> bytes | None:
        """Content of a small file, or None where the commit has none of that name."""
        try:
            return self._get(commit, name, {})
        except EntryNotFoundError:
            return None

    def read_sha256(self, commit: str, name: str, size: int) -> str:
        """The sha256 of a file, of its bytes as the Hub gives them."""
        whole = sha256()
        for offset in range(0, size, _RANGE_BYTES):
            last = min(offset + _RANGE_BYTES, size) - 1
            whole.update(self._get(commit, name, {"Range": f"bytes={offset}-{last}"}))
        return whole.hexdigest()

    def _get(self, commit: str, name: str, headers: Mapping[str, str]) -> bytes:
        url = hf_hub_url(self.repo_id, name, revision=commit, endpoint=self.caller.endpoint)

        def action(api: HfApi) -> bytes:
            response = get_session().get(url, headers={**build_hf_headers(token=api.token), **headers})
            hf_raise_for_status(response)
            return bytes(response.content)

        return self.caller.run(
            action, what="can't read a file", where=f"{self.where}: {name}", passing=(EntryNotFoundError,)
        )


def is_refused_parent(error: Exception) -> bool:
    """Whether a commit failed because another one came first."""
    return isinstance(error, HfHubHTTPError) and status_of(error) in (409, 412)
