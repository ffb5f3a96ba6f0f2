"""Whether a token of the Hub may write, asked before anything is sent."""

from __future__ import annotations

from huggingface_hub import HfApi, get_session
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import hf_raise_for_status

from ckptflow.errors import PermanentPublishError
from ckptflow.publish.hub_client import HubCaller
from ckptflow.publish.hub_errors import RIGHTS_FIX


def check_may_write(caller: HubCaller, repo_id: str, *, is_there: bool) -> None:
    """Ask the Hub, which says of a repository that is not there only what kind of token it is.

    Raises:
        PermanentPublishError: the token may not write.
    """
    # By hand: not every huggingface_hub that will do has auth_check(write=True).
    path = f"models/{repo_id}/auth-check/write" if is_there else "whoami-v2"

    def may_write(api: HfApi) -> bool:
        response = get_session().get(f"{caller.endpoint}/api/{path}", headers=build_hf_headers(token=api.token))
        if response.status_code in (403, 404):
            return response.status_code == 404  # a server that doesn't know the question refuses nothing
        hf_raise_for_status(response)
        return is_there or _role(response.json()) != "read"

    where = f"{caller.endpoint}/{repo_id}"
    if not caller.run(may_write, what="can't ask what the token may do", where=where):
        raise PermanentPublishError("this token may not write", file=where, fix=RIGHTS_FIX)


def _role(answer: object) -> object:
    for name in ("auth", "accessToken", "role"):
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer
