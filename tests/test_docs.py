"""What README.md and docs/ say is so: commands run, names are those of the code, messages are real."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import documentation as docs
from checkpoints import write_fsdp_step
from ckptflow.cli import main
from ckptflow.cli.main import COMMANDS, build_parser
from ckptflow.convert import convert
from ckptflow.dtypes import DTYPES
from ckptflow.formats.registry import FORMATS
from ckptflow.inspection import inspect_checkpoint
from ckptflow.request import ConvertRequest
from ckptflow.transforms.cast import FP32_GLOBS
from ckptflow.transforms.code_bases.registry import CODE_BASES
from ckptflow.transforms.megatron_families import FAMILIES
from documentation import ROOT
from retained import age, publish
from servers.hub import running_hub
from servers.seaweed import S3Server

DOCS = ROOT / "docs"
README, FORMATS_PAGE, OPERATIONS = ROOT / "README.md", DOCS / "formats.md", DOCS / "operations.md"
BUCKET = "bucket"

# Commands that run for long, or change a server: the test that runs each of them for real.
ELSEWHERE = {
    "ckptflow deploy": "test_watch_services.py::test_deploying_again_doubles_nothing",
    "ckptflow deploy --notify slack-webhook/training": (
        "test_watch_services.py::test_people_hear_of_refused_checkpoints_and_of_failures_in_different_words"
    ),
    "ckptflow deploy /shared/runs --to s3://bucket/models --file deployments/slurm.yaml --gpus 0 --runs-at-once 0": (
        "test_watch_services.py::test_the_files_for_other_sites_deploy_as_the_page_on_operations_shows"
    ),
    "ckptflow deploy /data/runs --to s3://bucket/models --file deployments/kubernetes.yaml --pool-type kubernetes "
    "--job-template deployments/kubernetes-job-template.json": (
        "test_watch_services.py::test_the_files_for_other_sites_deploy_as_the_page_on_operations_shows"
    ),
    "ckptflow run runs/my-run --to s3://bucket/models": (
        "test_flow_post_training.py::test_without_a_server_it_brings_its_own_and_publishes_to_a_directory"
    ),
    "ckptflow run runs/my-run/global_step_1100 --to s3://bucket/models": (
        "test_flow_post_training.py::test_a_checkpoint_is_published_with_the_bytes_that_convert_makes"
    ),
    "ckptflow seed-model config/ fresh/ --init-std small-init --seed 17": (
        "test_seed_model.py::test_the_command_tells_what_it_made_and_refuses_with_the_right_status"
    ),
    "dask scheduler --port 8786": (
        "test_flow_cluster.py::test_a_worker_killed_in_the_middle_of_a_file_costs_that_file_alone"
    ),
    "dask worker tcp://10.0.0.1:8786 --nworkers 4 --nthreads 1 --memory-limit 0": (
        "test_flow_cluster.py::test_a_worker_killed_in_the_middle_of_a_file_costs_that_file_alone"
    ),
    "make demo": "test_demo.py::test_the_demo_publishes_each_checkpoint_and_leaves_no_process_behind",
}
# Options of other programs that the pages speak of.
FOREIGN_OPTIONS = {"--port", "--pool", "--limit", "--ckpt-format", "--volumes", "--with-healthcheck"}


# --- commands


@pytest.mark.parametrize("page", docs.pages(), ids=lambda page: page.name)
def test_the_commands_of_a_page_do_what_it_shows(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    chosen = [c for c in docs.commands(page) if c.words[0] == "ckptflow" and c.text not in ELSEWHERE]
    if not chosen:
        return
    with prepared(page, tmp_path, monkeypatch, request):
        for command in chosen:
            status = main([word.replace("file:///", f"file://{tmp_path}/") for word in command.words[1:]])
            captured = capfd.readouterr()
            output = captured.out + captured.err
            # A page that shows a message shows a refusal.
            wanted = 1 if any(line.startswith("ckptflow: ") for line in command.shown) else 0
            assert status == wanted, f"{command}\n{output}"
            for line in command.shown:
                assert line in output, f"{command} does not say: {line}\n{output}"


@contextlib.contextmanager
def prepared(
    page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """A working directory in which the commands of a page find what they name."""
    monkeypatch.chdir(directory)
    texts = [command.text for command in docs.commands(page)]
    steps = [int(step) for step in re.findall(r"\bglobal_step_(\d+)\b", " ".join(texts))]
    for step in (800, 900, 1000, 1100) if page == OPERATIONS else sorted(set(steps)):
        write_fsdp_step(directory / "runs" / "my-run", step)
    age(directory)
    if any("s3://" in text for text in texts):
        use_s3(request.getfixturevalue("s3_server"), monkeypatch)
    if page == OPERATIONS:
        rows = [{"step": step, "eval_loss": 1000 / step} for step in (800, 900, 1000, 1100)]
        log = directory / "runs" / "my-run" / "metrics.jsonl"
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for step in (800, 900, 1000):
            path = directory / "runs" / "my-run" / f"global_step_{step}"
            publish(path, f"s3://{BUCKET}/models", directory / "scratch")
        convert(ConvertRequest(path=directory / "runs" / "my-run" / "global_step_1000", out=directory / "out"))
    if page == FORMATS_PAGE:
        copy_fixtures(request.getfixturevalue("fixtures_dir"), directory)
    with contextlib.ExitStack() as stack:
        if any("hf://" in text for text in texts):
            hub = stack.enter_context(running_hub(directory / "hub"))
            for name, value in hub.environment().items():
                monkeypatch.setenv(name, value)
        yield


def use_s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket that the pages name, empty."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    client = server.client()
    if BUCKET not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    client.close()


def copy_fixtures(fixtures_dir: Path, directory: Path) -> None:
    titan = fixtures_dir / "dcp_titan_w4_step10"
    for source, name in (
        (titan / "input" / "checkpoint" / "step-10", "titan/step-10"),
        (titan / "hf_config", "config"),
        (fixtures_dir / "fsdp1_lora_w2_llama" / "input", "lora"),
        (fixtures_dir / "peft-lora" / "input" / "adapter", "adapter"),
        (fixtures_dir / "peft-lora" / "input" / "base", "base"),
    ):
        shutil.copytree(source, directory / name, dirs_exist_ok=True)
    shutil.copy(fixtures_dir / "mx-module-fp32" / "input" / "mnist-0002.params", directory)


def test_no_command_goes_unchecked(subtests: pytest.Subtests) -> None:
    for command in (each for page in docs.pages() for each in docs.commands(page)):
        with subtests.test(command=str(command)):
            if command.words[0] == "ckptflow":
                parse(command.words)
            elif command.text not in ELSEWHERE:
                program = command.words[0].rpartition("/")[2]
                assert program in PROGRAMS, f"{command}: nothing checks {program}"
                PROGRAMS[program](command.words[1:])


def test_commands_that_run_elsewhere_do_so_in_a_test_that_exists() -> None:
    shown = {command.text for page in docs.pages() for command in docs.commands(page)}
    assert set(ELSEWHERE) <= shown, "no page shows this any more"
    assert [test for test in ELSEWHERE.values() if not docs.is_test(test)] == []


def parse(words: tuple[str, ...]) -> None:
    try:
        build_parser().parse_args(words[1:])
    except SystemExit as error:
        raise AssertionError(f"the command line does not take: {' '.join(words)}") from error


def _pip(words: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    for word in words[1:]:
        if word.startswith("-"):
            assert word == "--upgrade"
            continue
        match = re.fullmatch(r"ckptflow\[([\w,]+)\]|prefect-kubernetes", word)
        assert match, f"no such package: {word}"
        assert match[1] is None or set(match[1].split(",")) <= extras


def _copies(words: tuple[str, ...]) -> None:
    assert list(ROOT.glob(words[0])), f"no such file: {words[0]}"


def _systemctl(words: tuple[str, ...]) -> None:
    units = {path.name.removesuffix(".service") for path in (ROOT / "deployments" / "systemd").glob("*.service")}
    assert words[0] in ("enable", "stop", "restart", "daemon-reload", "status")
    for word in words[1:]:
        assert word == "--now" or re.sub(r"@.*", "@", word) in units, f"no such unit: {word}"


def _make(words: tuple[str, ...]) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for word in words:
        name = word.partition("=")[0]
        assert re.search(rf"^{name}:" if "=" not in word else rf"\b{name}\b", makefile, re.MULTILINE), word


def _export(words: tuple[str, ...]) -> None:
    for word in words:
        assert_known_variable(word.partition("=")[0])


def _useradd(words: tuple[str, ...]) -> None:
    for unit in (ROOT / "deployments" / "systemd").glob("*.service"):
        assert f"User={words[-1]}" in unit.read_text("utf-8")


def _source(words: tuple[str, ...]) -> None:
    assert words[0] in ("/etc/ckptflow/ckptflow.env", ".venv/bin/activate")


def _chmod(words: tuple[str, ...]) -> None:
    assert words[0] == "600"


def _docker(words: tuple[str, ...]) -> None:
    """Files and build arguments are there, and what the image is told is taken by the command line."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text("utf-8")
    for option, value in pairwise(words):
        assert option != "-f" or (ROOT / value).is_file(), f"no such file: {value}"
        if option == "--build-arg":
            assert re.search(rf"^ARG {value.partition('=')[0]}\b", dockerfile, re.MULTILINE), (
                f"no such argument: {value}"
            )
    assert words[0] in ("compose", "build", "run")
    if words[0] == "run":
        image = next(index for index, word in enumerate(words) if word.startswith("ckptflow:"))
        parse(("ckptflow", *words[image + 1 :]))


def _dask(words: tuple[str, ...]) -> None:
    """Options with which the tests start a cluster."""
    used = (ROOT / "tests" / "daskcluster.py").read_text("utf-8")
    assert all(f'"{word}"' in used for word in words if word in ("scheduler", "worker") or word.startswith("--"))


PROGRAMS: dict[str, Callable[[tuple[str, ...]], None]] = {
    "pip": _pip,
    "cp": _copies,
    "chmod": _chmod,
    "dask": _dask,
    "docker": _docker,
    "sbatch": _copies,
    "systemctl": _systemctl,
    "make": _make,
    "export": _export,
    "useradd": _useradd,
    ".": _source,
    "set": lambda words: None,
    "mkdir": lambda words: None,
    "python3": lambda words: None,
}


# --- names


@pytest.mark.parametrize("page", docs.pages(), ids=lambda page: page.name)
def test_commands_and_options_in_the_text_are_taken_by_the_command_line(page: Path) -> None:
    text = docs.prose(page)
    names = {module.__name__.rpartition(".")[2].replace("_", "-") for module in COMMANDS}
    options = {
        option
        for parser in build_parser()._subparsers._group_actions[0].choices.values()  # type: ignore[union-attr]
        for option in parser._option_string_actions
    }
    for span in docs.spans(text):
        words = shlex.split(span) if span.startswith("ckptflow ") else []
        if len(words) == 2 and words[1] != "COMMAND":
            assert words[1] in names, span
        elif len(words) > 2 and words[1] != "COMMAND" and not words[-1].startswith("--"):
            parse(tuple(words))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span):
            assert option in options | FOREIGN_OPTIONS, f"`{span}`: no command takes {option}"


def test_the_readme_lists_all_commands() -> None:
    (table,) = [rows for rows in docs.tables(README.read_text("utf-8")) if rows[0][0] == "Command"]
    listed = {docs.spans(row[0])[0].split()[0] for row in table[1:]}
    assert listed == {module.__name__.rpartition(".")[2].replace("_", "-") for module in COMMANDS}


VARIABLE = re.compile(r"\b(?:CKPTFLOW|PREFECT|AWS|HF)_[A-Z][A-Z0-9_]*[A-Z0-9]\b")


def variables_in(*roots: Path) -> set[str]:
    paths = [path for root in roots for path in (root.rglob("*") if root.is_dir() else [root])]
    files = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    texts = (path.read_text("utf-8", "replace") for path in files)
    return {name for text in texts for name in VARIABLE.findall(text)}


def limits() -> dict[str, float]:
    """Variables of the tasks' limits, and their defaults."""
    from ckptflow_tasks.limits import Limits

    return {f"CKPTFLOW_{name.upper()}": field.default for name, field in Limits.model_fields.items()}


@cache
def variables_of_the_code() -> set[str]:
    places = (*docs.SOURCES, ROOT / "deployments", ROOT / "docker", ROOT / "Makefile")
    return variables_in(*(place for place in places if place.exists())) | set(limits())


@cache
def variables_of_the_tests() -> set[str]:
    return variables_in(*(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)))


def assert_known_variable(name: str) -> None:
    known = variables_of_the_code() | variables_of_the_tests()
    assert name in known or (name.startswith("PREFECT_") and name in settings_of_prefect()), f"nothing reads {name}"


@cache
def settings_of_prefect() -> set[str]:
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_settings_fields

    return {name.upper() for name in _get_settings_fields(Settings)}


def test_variables_on_the_pages_are_read_by_something() -> None:
    for page in docs.pages():
        for name in sorted(set(VARIABLE.findall(page.read_text("utf-8")))):
            assert_known_variable(name)


def test_each_variable_of_ours_is_on_a_page() -> None:
    written = {name for page in docs.pages() for name in VARIABLE.findall(page.read_text("utf-8"))}
    assert {name for name in variables_of_the_code() if name.startswith("CKPTFLOW_")} <= written


def test_limits_are_listed_with_their_defaults() -> None:
    (table,) = [rows for rows in docs.tables(OPERATIONS.read_text("utf-8")) if rows[0][:2] == ["Variable", "Default"]]
    assert {docs.spans(row[0])[0]: float(row[1]) for row in table[1:]} == limits()


@pytest.mark.parametrize("page", docs.pages(), ids=lambda page: page.name)
def test_links_names_and_tests_lead_somewhere(page: Path) -> None:
    text = docs.prose(page)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: no {target}"
        assert not anchor or anchor in docs.anchors(there), f"{page.name}: no heading for {target}"
    for name, path in re.findall(r"`(\w+)` in \[[\w.]+\]\(([^)]+\.py)\)", text):
        code = (page.parent / path).read_text("utf-8")
        assert re.search(rf"^(?:class|def) {name}\b|^{name}\b.* = ", code, re.MULTILINE), f"no {name} in {path}"
    for test in re.findall(r"`(test_\w+\.py::test_\w+)`", text):
        assert docs.is_test(test), f"{page.name}: no test {test}"


# --- messages and layouts


MESSAGE_COLUMNS = ("Message", "Message or symptom", "State and reason")


@pytest.mark.parametrize("page", [FORMATS_PAGE, OPERATIONS], ids=lambda page: page.name)
def test_messages_are_those_of_the_code(page: Path) -> None:
    tables = [rows for rows in docs.tables(page.read_text("utf-8")) if rows[0][0] in MESSAGE_COLUMNS]
    quoted = [span for rows in tables for row in rows[1:] for span in docs.spans(row[0])]
    assert len(quoted) > 20
    texts = docs.texts_of_the_code()
    unknown = [m for m in quoted if not (m.startswith(("found: ", "PREFECT_")) or texts.holds(m))]
    assert unknown == []
    cures = (ROOT / "src" / "ckptflow" / "publish" / "s3_errors.py").read_text("utf-8")
    assert [m for m in quoted if m.startswith("found: ") and m.removeprefix("found: ") not in cures] == []


def layout_table() -> dict[str, list[str]]:
    (table,) = [rows for rows in docs.tables(FORMATS_PAGE.read_text("utf-8")) if rows[0][-1] == "Test checkpoint"]
    return {docs.spans(row[0])[0]: row for row in table[1:]}


def test_each_layout_stands_in_the_table_and_on_the_front_page() -> None:
    layouts = [fmt.layout for fmt in FORMATS]
    assert sorted(layout_table()) == sorted(layouts)
    readme = set(docs.spans(docs.section(README, "What it reads")))
    assert readme >= set(layouts)
    (read,) = [
        rows for rows in docs.tables(FORMATS_PAGE.read_text("utf-8")) if rows[0] == ["Layout", "Read", "Left out"]
    ]
    assert sorted(layout for row in read[1:] for layout in docs.spans(row[0])) == sorted(layouts)


def test_the_checkpoint_that_stands_for_a_layout_is_of_that_layout(
    fixtures_dir: Path, subtests: pytest.Subtests
) -> None:
    cases = json.loads((fixtures_dir / "cases.json").read_text())
    for layout, row in layout_table().items():
        with subtests.test(layout=layout):
            name = docs.spans(row[-1])[0]
            case = next(case for case in cases if case["fixture"] == name)
            fixture = fixtures_dir / name
            config_dir = fixture / "hf_config" if layout.startswith("megatron") and case.get("args") else None
            summary = inspect_checkpoint(fixture / case["path"], config_dir=config_dir)
            assert summary.manifest.layout == layout


def test_families_and_dtypes_are_those_of_the_code() -> None:
    families = docs.section(FORMATS_PAGE, "Megatron families").partition("Value heads")[0]
    assert set(docs.spans(families)) - {"model_type"} == {name for family in FAMILIES for name in family.model_types}
    (tables,) = [rows for rows in docs.tables(FORMATS_PAGE.read_text("utf-8")) if rows[0][0] == "Names of"]
    assert [docs.spans(row[1]) for row in tables[1:]] == [
        [kind for family in code_base.families for kind in family.model_types] for code_base in CODE_BASES
    ]
    text = docs.section(FORMATS_PAGE, "Dtypes")
    assert set(docs.spans(text.partition("`--dtype`")[0])) == set(DTYPES)
    assert {span for span in docs.spans(text) if span.startswith("*")} == {glob for glob, _ in FP32_GLOBS}
