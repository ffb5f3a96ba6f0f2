"""What the demo says on the terminal, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckptflow.demo.options import BUCKET, DESTINATION, PROMPT
from ckptflow.errors import CkptflowError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ckptflow.demo.published import Impression, PublishedModel
    from ckptflow.demo.services import Services


def introduce(console: Console, run_dir: Path, save_steps: Sequence[int]) -> None:
    """Says what will be trained."""
    from ckptflow.demo.train import WORLD_SIZE

    steps = ", ".join(map(str, save_steps))
    console.print(f"[bold]Training[/] a tiny Llama on Pride and Prejudice: {WORLD_SIZE} ranks, FSDP2, CPU.")
    console.print(f"Checkpoints after global steps {steps}: sharded, fp32, as verl writes them, in")
    console.print(f"  {run_dir}", soft_wrap=True)


def show_servers(console: Console, services: Services) -> None:
    """Says where the servers are."""
    console.print(f"[green]up[/] Prefect server    {services.prefect.ui_url}")
    console.print(f"[green]up[/] S3 (SeaweedFS)    {services.s3.endpoint_url}")


@contextmanager
def training_progress(console: Console, last_step: int) -> Iterator[Callable[[int, float], None]]:
    """A progress bar of global steps; gives the function that moves it: (global step, loss)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=last_step, loss=float("nan"))

        def show_step(global_step: int, loss: float) -> None:
            progress.update(task, completed=global_step, loss=loss)

        yield show_step


def show_published(console: Console, global_step: int, seconds: float) -> None:
    """One line per finished flow run."""
    console.print(
        f"[green]ok[/] global_step_{global_step}: saved by training, published by the flow in {seconds:.0f} s"
    )


def show_results(console: Console, services: Services, fetch_dir: Path) -> None:
    """Fetches what was published, tries it out, and prints the table and the sentences of the first and the last.

    Raises:
        CkptflowError: nothing was published.
    """
    from ckptflow.demo import published
    from ckptflow.demo.text import split_text

    client = services.s3_client()
    models = published.list_published(client, BUCKET)
    if not models:
        raise CkptflowError("no model is at the destination", file=DESTINATION, expected="one per checkpoint")
    _, held_back = split_text()
    with console.status("fetching the published models from S3 and loading them with transformers"):
        impressions = [
            published.try_out(
                published.fetch(client, model, fetch_dir / f"global_step_{model.global_step}"), held_back, PROMPT
            )
            for model in models
        ]
    console.print()
    console.print(_table(models, impressions))
    for model, impression in ((models[0], impressions[0]), (models[-1], impressions[-1])):
        console.print(f"\n[bold]global step {model.global_step}[/] continues [italic]{PROMPT}[/] …")
        console.print(f"  {impression.sentence}", markup=False, highlight=False)


def _table(models: Sequence[PublishedModel], impressions: Sequence[Impression]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    dtypes = ", ".join(sorted({impression.dtype for impression in impressions}))
    table = Table(
        title=f"Published models ({dtypes})",
        caption="loss: nats per token on text that was held back from training",
        box=SIMPLE_HEAD,
    )
    table.add_column("step", justify="right")
    table.add_column("URI", no_wrap=True)
    table.add_column("files", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("sha256")
    table.add_column("loss", justify="right")
    for model, impression in zip(models, impressions, strict=True):
        table.add_row(
            str(model.global_step),
            model.uri,
            str(len(model.sizes_bytes)),
            f"{sum(model.sizes_bytes.values()):,}",
            impression.sha256[:8],
            f"{impression.loss:.3f}",
        )
    return table


def say_goodbye(console: Console, services: Services, work_dir: Path, *, kept: bool, seconds: float) -> None:
    """The URLs to look at, how to stop what is still up, and the total time."""
    console.print("\n[bold]Flow runs[/]")
    for run in services.prefect.flow_runs():
        console.print(f"  {run.name}: {run.state}, {run.seconds:.0f} s  {run.url if kept else ''}", soft_wrap=True)
    console.print(f"[bold]Files[/]  {work_dir}", soft_wrap=True)
    if kept:
        console.print("[bold]Still up[/]")
        console.print(f"  Prefect UI   {services.prefect.ui_url}")
        access_key, secret_key = services.env["AWS_ACCESS_KEY_ID"], services.env["AWS_SECRET_ACCESS_KEY"]
        console.print(f"  S3 endpoint  {services.s3.endpoint_url}  (access key {access_key}, secret key {secret_key})")
        console.print(f"  Stop both    kill {services.prefect.pid} {services.s3.pid}")
    else:
        console.print(
            "The servers are stopped. [bold]make demo KEEP=1[/] leaves them up, to look at the runs in the UI."
        )
    console.print(f"[bold]{seconds:.0f} s[/] in all")
