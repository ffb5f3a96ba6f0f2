"""``ckptflow upload OUT DEST``."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ckptflow.cli.console import format_bytes, print_json, progress_bar
from ckptflow.cli.options import add_json, local_path

DESTINATIONS = (
    "file:///DIR, s3://BUCKET/PREFIX, or hf://ORG/NAME on the Hub: hf://ORG/NAME@BRANCH makes the branch if need be, "
    "hf://ORG/NAME@tag:TAG commits to main and puts a tag on it"
)
ENDPOINTS = "S3 server that isn't AWS, or another Hub; or set AWS_ENDPOINT_URL or HF_ENDPOINT"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser("upload", help="publish a model directory, whole or not at all")
    parser.add_argument("out", type=local_path, metavar="OUT")
    parser.add_argument("destination", metavar="DEST", help=DESTINATIONS)
    parser.add_argument("--overwrite", action="store_true", help="replace another model at DEST")
    parser.add_argument("--endpoint-url", metavar="URL", help=ENDPOINTS)
    parser.add_argument("--verify", default="auto", choices=("auto", "full", "size"), help="how copies are proven")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", help="on the Hub; this is the default")
    visibility.add_argument("--public", action="store_true", help="on the Hub: new or existing repository, for all")
    parser.add_argument("--license", metavar="NAME", help="on the Hub's model card, such as apache-2.0")
    parser.add_argument("--base-model-id", metavar="ORG/NAME", help="on the Hub's model card")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Upload and say what is there now."""
    from ckptflow.publish.model import read_local_model
    from ckptflow.publish.settings import PublishSettings
    from ckptflow.publish.upload import upload

    settings = PublishSettings(
        endpoint_url=args.endpoint_url,
        verify=args.verify,
        visibility="public" if args.public else "private",
        license=args.license,
        base_model_id=args.base_model_id,
    )
    total = read_local_model(args.out).total_bytes
    with progress_bar("uploading", total, quiet=args.json) as progress:
        record = upload(args.out, args.destination, settings=settings, progress=progress, overwrite=args.overwrite)
    if args.json:
        print_json(asdict(record))
        return 0
    state = "was published already" if record.already_published else "published"
    commit = "" if record.revision is None else f", commit {record.revision[:12]}"
    print(f"{record.uri}: {state}, {len(record.files)} files, {format_bytes(record.total_bytes)}{commit}")
    return 0
