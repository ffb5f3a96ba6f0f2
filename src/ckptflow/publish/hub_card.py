"""The model card (``README.md``): made from the record, or checked where the model brings its own. Pure.

The Hub checks a card when it is committed, after all large files were sent; what it refuses is refused here before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from ckptflow.errors import PermanentPublishError
from ckptflow.publish.model import LocalModel, is_weight_name

CARD_NAME = "README.md"

#: In each card that was made here: a card without it is a person's, and is left alone.
MADE_HERE = "<!-- made by ckptflow: delete this line to keep your own text -->"

_FRONT_MATTER = re.compile(r"\A(?:\ufeff)?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_MODEL_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[\w-][\w.-]{0,95}")  # the oldest models have no ORG

#: https://huggingface.co/docs/hub/repositories-licenses
_LICENSE_NAMES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc
cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0
cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0
cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1
eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c
ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa
unlicense zlib pddl lgpl-lr deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1
llama3.2 llama3.3 llama4 gemma grok2-community unknown other
"""
LICENSES = frozenset(_LICENSE_NAMES.split())


def check_card_options(license_name: str | None, base_model_id: str | None) -> None:
    """Refuse a license or a base model that the Hub would refuse.

    Raises:
        PermanentPublishError: with the cure.
    """
    if license_name is not None:
        _check_license(license_name, "--license")
    if base_model_id is not None:
        _check_base_model(base_model_id, "--base-model-id")


def check_card(content: bytes, where: str) -> None:
    """Refuse a card that a model brings along and that the Hub would refuse.

    Raises:
        PermanentPublishError: its front matter is not YAML, or names no known license or Hub id of a base model.
    """
    try:
        text = content.decode()
        match = _FRONT_MATTER.search(text)
        card = yaml.safe_load(match[1]) if match else {}
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise _bad_card(where, "front matter in YAML", str(error).partition("\n")[0]) from error
    if not isinstance(card, dict):
        raise _bad_card(where, "front matter of names and values", type(card).__name__)
    for license_name in _listed(card.get("license")):
        _check_license(license_name, where)
    for base_model in _listed(card.get("base_model")):
        _check_base_model(base_model, where)


def make_card(
    model: LocalModel, repo_id: str, revision: str, license_name: str | None, base_model_id: str | None
) -> bytes:
    """A card that says what the model is, what it was made from, and how to check that.

    Raises:
        PermanentPublishError: the Hub would refuse the license or the base model.
    """
    check_card_options(license_name, base_model_id)
    facts: dict[str, object] = {"library_name": "transformers"}
    if license_name is not None:
        facts["license"] = license_name
    if base_model_id is not None:
        facts["base_model"] = base_model_id
    facts["tags"] = ["ckptflow"]
    record: Mapping[str, Any] = json.loads(model.marker_content)
    head = yaml.safe_dump(facts, sort_keys=False).rstrip()
    title = repo_id if revision == "main" else f"{repo_id}@{revision}"
    lines = ["---", head, "---", MADE_HERE, "", f"# {title}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in _provenance(model, record, base_model_id)]
    lines += ["", "`ckptflow.json` names the source of each tensor. The files:", "", "| File | Bytes | sha256 |"]
    lines += ["|---|---|---|"]
    lines += [f"| {_cell(f.name)} | {f.bytes} | `{f.sha256}` |" for f in model.files if is_weight_name(f.name)]
    return "\n".join([*lines, ""]).encode()


def _provenance(model: LocalModel, record: Mapping[str, Any], base_model_id: str | None) -> list[tuple[str, object]]:
    source, recipe = _mapping(record.get("source")), _mapping(record.get("recipe"))
    rows = [
        ("Base model", base_model_id),
        ("Global step", source.get("global_step")),
        ("Checkpoint", source.get("name")),
        ("Layout", source.get("layout")),
        ("World size", source.get("world_size")),
        ("Device mesh", source.get("mesh")),
        ("dtype", recipe.get("dtype")),
        ("Made by", record.get("created_by")),
        ("Fingerprint", model.marker.fingerprint),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _cell(value: object) -> str:
    # A run's name is a person's text: it must not end the cell or the line.
    return re.sub(r"\s+", " ", str(value)).replace("|", "\\|").replace("<", "&lt;")


def _listed(value: object) -> list[object]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _check_license(name: object, where: str) -> None:
    if name not in LICENSES:
        raise _bad_card(
            where,
            "a license as the Hub names it (apache-2.0, mit, llama3.1, …)",
            f"license: {name}",
            "take one of https://huggingface.co/docs/hub/repositories-licenses; `other` for one that is not there",
        )


def _check_base_model(name: object, where: str) -> None:
    if not isinstance(name, str) or not _MODEL_ID.fullmatch(name):
        raise _bad_card(
            where,
            "the Hub id of the base model (ORG/NAME)",
            f"base_model: {name}",
            "give the base model's Hub id, not a path on this machine; leave it out where there is none",
        )


def _bad_card(where: str, expected: str, found: str, fix: str | None = None) -> PermanentPublishError:
    return PermanentPublishError(
        "the Hub would refuse the model card",
        file=where,
        expected=expected,
        found=found,
        fix=fix or "correct the front matter of README.md",
    )
