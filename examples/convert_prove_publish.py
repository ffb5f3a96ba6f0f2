"""One checkpoint, from Python, without Prefect: convert, prove, publish.

python examples/convert_prove_publish.py runs/my-run/global_step_1000 models/step-1000 s3://bucket/my-run/step-1000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptflow.convert import convert
from ckptflow.errors import CkptflowError
from ckptflow.publish.upload import upload
from ckptflow.request import ConvertRequest
from ckptflow.validate.verify import verify


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("destination", help="file:///DIR, s3://BUCKET/PREFIX or hf://ORG/NAME")
    arguments = parser.parse_args()
    try:
        record = convert(ConvertRequest(path=arguments.checkpoint, out=arguments.out, dtype="bfloat16"))
        for note in record["notes"]:
            print(f"note: {note}")
        report = verify(arguments.out, against=arguments.checkpoint, forward=True)
        report.raise_if_failed()
        published = upload(arguments.out, arguments.destination)
    except CkptflowError as error:  # names the file, the tensor, and what to do
        raise SystemExit(str(error)) from error
    print(f"{published.uri}: {len(published.files)} files, {len(report.checks)} checks")


if __name__ == "__main__":
    main()
