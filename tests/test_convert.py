"""A conversion leaves a whole model or nothing; running it again is free; two at once take turns."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptflow.conversion import plan_conversion, recipe_of
from ckptflow.convert import claim, convert, finish, write_file
from ckptflow.discovery.destinations import destination_of
from ckptflow.errors import (
    CorruptFileError,
    InconsistentCheckpointError,
    OutputError,
    SourceChangedError,
    UnsafeFileError,
    UnsupportedCheckpointError,
    ValueRefusedError,
)
from ckptflow.formats.registry import locate
from ckptflow.publish.status import is_published
from ckptflow.publish.upload import upload
from ckptflow.request import ConvertRequest
from ckptflow.validate.structure import check_dtypes
from ckptflow.validate.verify import open_output
from validation import flip_bit

LAYERS = 6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory with fp32 weights in one file."""
    directory = tmp_path / "run" / "checkpoint-10"
    directory.mkdir(parents=True)
    write_weights(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layers.{i}.weight": random.standard_normal((64, 32), dtype=np.float32) for i in range(LAYERS)}


def write_weights(directory: Path, seed: int = 0, **extra: np.ndarray) -> None:
    save_file({**weights(seed), **extra}, directory / "model.safetensors", metadata={"format": "pt"})


def request(model: Path, out: Path, **options: object) -> ConvertRequest:
    return replace(ConvertRequest(path=model, out=out, max_shard_bytes=5_000), **options)  # type: ignore[arg-type]


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_output_is_a_model_with_index_config_and_record(model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    out = tmp_path / "out"
    record = convert(request(model, out))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == LAYERS * 64 * 32 * 2
    for fqn, value in weights().items():
        got = load_torch(out / index["weight_map"][fqn])[fqn]
        assert torch.equal(got, torch.from_numpy(value).to(torch.bfloat16))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((out / "ckptflow.json").read_text()) == record
    assert set(record["files"]) == {p.name for p in out.iterdir()} - {"ckptflow.json"}
    assert set(os.listdir(tmp_path)) == {"run", "out"}, "nothing is left beside the output"


def test_the_same_work_gives_the_same_bytes_whatever_the_threads(model: Path, tmp_path: Path) -> None:
    convert(request(model, tmp_path / "a", threads=1))
    convert(request(model, tmp_path / "b", threads=4, memory_budget_bytes=64 * 10**6))
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_config_says_the_dtype_that_was_asked_for_even_where_kept_tensors_outweigh_the_rest(
    model: Path, tmp_path: Path
) -> None:
    write_weights(model, **{"model.embed_tokens.weight": np.ones((2000, 64), dtype=np.float32)})
    convert(request(model, tmp_path / "out", keep_dtype=("*embed_tokens*",)))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    output, _ = open_output(tmp_path / "out")
    assert check_dtypes(output.tensors, output.config, output.record).status == "passed"


def test_what_a_release_with_other_rules_wrote_is_not_taken_for_the_result(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(model, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("ckptflow.transforms.cast.FP32_GLOBS", (("layers.0.*", "a rule of that release"),))
        convert(asked)
    with pytest.raises(OutputError, match="OUT already holds something else"):
        convert(asked)
    shutil.copytree(model, tmp_path / "elsewhere" / model.name)
    moved = convert(replace(asked, path=tmp_path / "elsewhere" / model.name, overwrite=True))
    assert convert(asked) == moved, "a copy is the same checkpoint"


def test_another_recipe_at_the_destination_is_not_taken_for_this_one(model: Path, tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/models"
    asked = request(model, tmp_path / "out")
    convert(asked)
    location = locate(model)
    upload(asked.out, destination_of(location, destination))
    assert is_published(location, destination)
    assert is_published(location, destination, recipe=recipe_of(asked))
    assert not is_published(location, destination, recipe=recipe_of(replace(asked, dtype="float32")))
    write_weights(model, seed=3)
    assert not is_published(location, destination)


def test_a_second_run_finds_the_work_done(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = convert(request(model, out))
    inodes = {p: p.stat().st_ino for p in out.iterdir()}
    assert convert(request(model, out)) == first
    assert {p: p.stat().st_ino for p in out.iterdir()} == inodes


def test_another_dtype_or_another_checkpoint_needs_overwrite(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(request(model, out))
    before = tree(out)
    with pytest.raises(OutputError, match="something else"):
        convert(request(model, out, dtype="float16"))
    write_weights(model, seed=1)
    with pytest.raises(OutputError, match="something else"):
        convert(request(model, out))
    assert tree(out) == before
    convert(request(model, out, dtype="float16", overwrite=True))
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    assert set(os.listdir(tmp_path)) == {"run", "out"}


def test_files_that_ckptflow_did_not_write_are_never_replaced_unasked(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputError, match="something else"):
        convert(request(model, out))
    assert (out / "thesis.txt").read_text() == "years of work"


def test_a_damaged_output_is_noticed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(request(model, out))
    victim = out / "model-00002-of-00006.safetensors"
    flip_bit(victim, -1)
    damaged = victim.read_bytes()
    with pytest.raises(OutputError, match="changed since") as error:
        convert(request(model, out))
    assert victim.name in str(error.value)
    convert(request(model, out, overwrite=True))
    assert victim.read_bytes() != damaged


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_weights_leave_nothing_behind(model: Path, tmp_path: Path, bad: float) -> None:
    poisoned = np.ones((8, 8), dtype=np.float32)
    poisoned[3, 5] = bad
    write_weights(model, **{"zz.bad.weight": poisoned})
    with pytest.raises(ValueRefusedError, match=r"zz\.bad\.weight"):
        convert(request(model, tmp_path / "deep" / "er" / "out"))
    assert set(os.listdir(tmp_path)) == {"run"}


def test_a_tie_that_the_values_deny_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    embedding = np.ones((16, 4), dtype=np.float32)
    head = embedding.copy()
    head[9, 1] += 1
    write_weights(model, **{"model.embed_tokens.weight": embedding, "lm_head.weight": head})
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    with pytest.raises(InconsistentCheckpointError, match=r"lm_head\.weight"):
        convert(request(model, tmp_path / "out"))
    assert set(os.listdir(tmp_path)) == {"run"}


def test_equal_tied_weights_are_written_once(model: Path, tmp_path: Path) -> None:
    embedding = np.ones((16, 4), dtype=np.float32)
    write_weights(model, **{"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
    (model / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    record = convert(request(model, tmp_path / "out"))
    assert "lm_head.weight" not in record["tensors"]
    assert record["ties"] == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_source_that_changes_meanwhile_is_refused(model: Path, tmp_path: Path) -> None:
    conversion = plan_conversion(request(model, tmp_path / "out"))

    def convert_while_the_trainer_writes() -> None:
        with claim(conversion):
            for number in range(len(conversion.plan.files)):
                write_file(conversion, number)
            os.utime(model / "model.safetensors", ns=(1, 1))
            finish(conversion)

    with pytest.raises(SourceChangedError):
        convert_while_the_trainer_writes()
    assert set(os.listdir(tmp_path)) == {"run"}


def test_a_link_out_of_the_checkpoint_is_not_followed(model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (model / "special_tokens_map.json").symlink_to(secret)
    with pytest.raises(UnsafeFileError, match="link"):
        convert(request(model, tmp_path / "out"))


def test_a_snapshot_in_the_hubs_cache_is_converted_with_its_config(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    (cache / "snapshots").mkdir(parents=True)
    model.rename(cache / "blobs")
    snapshot = cache / "snapshots" / "0123abcd"
    for name in ("model.safetensors", "config.json", "additional_chat_templates/a.jinja"):
        link, blob = snapshot / name, cache / "blobs" / Path(name).name
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.touch()
        link.symlink_to(os.path.relpath(blob, link.parent))
    convert(request(snapshot, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "out" / "additional_chat_templates" / "a.jinja").is_file()


def sentence_transformers_files(directory: Path) -> dict[str, bytes]:
    """What its version 6.2 saves around a model with pooling and a dense layer; name → content."""
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]
    settings = {
        "modules.json": modules,
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
        "sentence_bert_config.json": {"max_seq_length": 512},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode": "cls"},
        "2_Dense/config.json": {"in_features": 32, "out_features": 8},
    }
    for name, content in settings.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    save_file({"linear.weight": np.ones((8, 32), np.float32)}, directory / "2_Dense" / "model.safetensors")
    return {name: (directory / name).read_bytes() for name in (*settings, "2_Dense/model.safetensors")}


def test_the_modules_around_a_model_of_sentence_transformers_are_carried_over(model: Path, tmp_path: Path) -> None:
    files = sentence_transformers_files(model)
    record = convert(request(model, tmp_path / "out"))
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    assert files.keys() < record["files"].keys()
    assert any("sentence-transformers" in note for note in record["notes"])
    open_output(tmp_path / "out")


def test_a_module_of_sentence_transformers_in_a_pickle_is_refused_instead_of_left_out(
    model: Path, tmp_path: Path
) -> None:
    sentence_transformers_files(model)
    (model / "2_Dense" / "model.safetensors").rename(model / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(UnsupportedCheckpointError, match=r"2_Dense/pytorch_model\.bin"):
        convert(request(model, tmp_path / "out"))
    (model / "modules.json").unlink()
    assert "2_Dense/pytorch_model.bin" not in convert(request(model, tmp_path / "out"))["files"]


def test_a_broken_config_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text("[" * 100_000)
    with pytest.raises(CorruptFileError, match="not valid JSON"):
        convert(request(model, tmp_path / "out"))


def test_a_full_disk_is_told_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 5))
    with pytest.raises(OutputError, match="too full"):
        convert(request(model, tmp_path / "out"))
    assert set(os.listdir(tmp_path)) == {"run"}


def test_two_runs_at_once_do_the_work_once(model: Path, tmp_path: Path) -> None:
    written: list[int] = []
    records = []

    def run() -> None:
        records.append(convert(request(model, tmp_path / "out"), lambda conversion: written.append))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records) == 4
    assert all(record == records[0] for record in records)
    assert sum(written) == LAYERS * 64 * 32 * 2, "one run wrote all, the others nothing"
    assert set(os.listdir(tmp_path)) == {"run", "out"}


KILLED = """
import os, signal, sys
from pathlib import Path
from ckptflow.conversion import plan_conversion
from ckptflow.convert import claim, write_file
from ckptflow.request import ConvertRequest
conversion = plan_conversion(ConvertRequest(path=Path(sys.argv[1]), out=Path(sys.argv[2]), max_shard_bytes=5_000))
with claim(conversion):
    for number in range(3):
        write_file(conversion, number)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_kill_finished_files_are_not_written_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, model, out], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    left = {p.name: p.stat().st_ino for p in (tmp_path / ".out.ckptflow").rglob("*.safetensors")}
    assert len(left) == 3
    convert(request(model, out))
    assert {name: (out / name).stat().st_ino for name in left} == left
    convert(request(model, tmp_path / "fresh"))
    assert tree(out) == tree(tmp_path / "fresh")
    assert set(os.listdir(tmp_path)) == {"run", "out", "fresh"}


def test_what_another_conversion_left_is_cleared_away(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, model, out], check=False)
    write_weights(model, seed=7)
    convert(request(model, out))
    convert(request(model, tmp_path / "fresh"))
    assert tree(out) == tree(tmp_path / "fresh")
    assert set(os.listdir(tmp_path)) == {"run", "out", "fresh"}


def test_a_torn_leftover_is_written_again(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, model, out], check=False)
    workspace = tmp_path / ".out.ckptflow"
    weights_left, records_left = sorted(workspace.rglob("*.safetensors")), sorted(workspace.rglob("*.safetensors.json"))
    os.truncate(weights_left[0], 100)
    records_left[1].write_text('{"name": "mod')
    convert(request(model, out))
    convert(request(model, tmp_path / "fresh"))
    assert tree(out) == tree(tmp_path / "fresh")


def test_a_waiting_run_goes_on_when_the_first_is_killed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = KILLED.replace(
        "os.kill(os.getpid(), signal.SIGKILL)", "print('held', flush=True); import time; time.sleep(60)"
    )
    first = subprocess.Popen([sys.executable, "-c", script, model, out], stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"held\n"
    second = threading.Thread(target=convert, args=(request(model, out),))
    second.start()
    time.sleep(0.3)
    assert second.is_alive(), "the second run waits"
    first.kill()
    first.wait()
    first.stdout.close()
    second.join(timeout=30)
    assert (out / "ckptflow.json").is_file()
