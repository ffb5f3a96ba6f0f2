"""An evaluation of your own, started by each model that ckptflow publishes.

Beside a site that ``ckptflow deploy`` set up, with ``PREFECT_API_URL`` set; it serves until it is stopped:

    python examples/evaluate_published.py held-back.txt

The model must be published to a ``file://`` destination that this machine sees.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from urllib.parse import unquote, urlsplit

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.events import DeploymentEventTrigger

MAX_TOKENS = 2048


@task
def perplexity(model: Path, text: str) -> float:
    """exp of the mean loss per token, over the text's first ``MAX_TOKENS`` tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[:, :MAX_TOKENS]
    with torch.inference_mode():
        loss = AutoModelForCausalLM.from_pretrained(model)(tokens, labels=tokens).loss
    return math.exp(float(loss))


@flow(name="evaluate-published", log_prints=True)
def evaluate(destination: str, global_step: int, text: str) -> float:
    """The perplexity of a published model.

    Args:
        destination: where it is, as the event says: ``file:///DIR``.
        global_step: the step of its checkpoint.
        text: a file that was not trained on.
    """
    value = perplexity(Path(unquote(urlsplit(destination).path)), Path(text).read_text())
    create_table_artifact([{"model": destination, "step": global_step, "perplexity": value}], key="perplexity")
    print(f"{destination}: perplexity {value:.2f}")
    return value


def main() -> None:
    """Serve the flow; one run for each event ``ckptflow.checkpoint.published``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="held-back text")
    text = parser.parse_args().text.resolve(strict=True)
    published = DeploymentEventTrigger(
        name="a model was published",
        expect={"ckptflow.checkpoint.published"},
        match={"ckptflow.destination": "file://*"},
        parameters={
            "destination": "{{ event.payload.destination }}",
            "global_step": {
                "__prefect_kind": "json",
                "value": {"__prefect_kind": "jinja", "template": "{{ event.payload.global_step }}"},
            },
            "text": str(text),
        },
    )
    evaluate.serve(name="each-published-model", triggers=[published])


if __name__ == "__main__":
    main()
