"""Faults that people reported of other tools: what the tests of their small inputs share.

They are in ``test_faults_*``, but for those whose input is the subject of a test elsewhere:

| fault | test |
|---|---|
| B10 equal head and embedding that are apart | test_convert: equal_tied_weights_are_written_once |
| B13 buffers that all ranks repeat | test_format_fsdp: plain_tensors_that_all_ranks_repeat_are_taken_once |
| B15 adapter in rank files | test_lora_plan: adapters_fold_to_what_peft_merges |
| B17 names of a wrapped model | test_format_huggingface: names_of_a_wrapped_model_are_never_taken_as_they_are |
| B20 tracker missing or behind | test_format_fsdp: a_run_without_a_tracker_…, a_tracker_that_lags_behind_… |
| B27 shards without an index | test_format_huggingface: shards_come_back_with_and_without_their_index |
| B29 source rewritten meanwhile | test_convert: a_source_that_changes_meanwhile_is_refused |
| B31 cut files | test_torchfiles_broken: a_file_cut_off_anywhere_…; test_format_safetensors: a_file_cut_anywhere_… |
| B33 padding of several groups | test_format_deepspeed: zero_2_groups_are_joined_over_ranks |
| B35 frozen weights saved empty | test_format_deepspeed: frozen_weights_that_were_saved_empty_are_named |
| B37 experts | test_format_deepspeed_parallel: experts_are_joined_under_their_global_numbers |
| B44 odd partition boundaries | test_format_deepspeed: zero_2_…, zero_3_parameters_are_joined_… |
| B45 names that match nothing | test_format_megatron_legacy: a_tensor_that_no_table_knows_…, an_expert_… |
| B46 B48 gate and up, vocabulary padding | test_format_megatron_legacy: every_family_comes_back_bit_for_bit |
| B54 dtypes that must stay | test_transforms: tensors_that_need_fp32_keep_it_…; test_engine_refusals |
| B58 an index of another save | test_format_huggingface: a_missing_shard_is_incomplete_… |
| B66 names that are renamed meanwhile | test_discover: staging_names_are_ignored, steps_that_are_renamed_… |
| B81 an index that leads outside | test_format_huggingface: an_index_that_leads_out_…, a_shard_that_is_a_link_out_… |
| L3 .metadata of another save | test_format_dcp: metadata_of_another_step_…, data_files_of_another_step_… |
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from ckptflow.convert import convert
from ckptflow.errors import CheckpointError
from ckptflow.request import ConvertRequest


def converted(path: Path, out: Path, **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that were written, and the record."""
    record = convert(ConvertRequest(path=path, out=out, **{"dtype": "source", **options}))
    return {n: t for file in sorted(out.glob("*.safetensors")) for n, t in load_file(file).items()}, record


def refused(path: Path, out: Path, **options: Any) -> CheckpointError:
    """The error of a conversion that leaves nothing."""
    with pytest.raises(CheckpointError) as error:
        convert(ConvertRequest(path=path, out=out, **options))
    assert not out.exists()
    return error.value


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """The same names, shapes and values."""
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    """A checkpoint of torch's DCP, of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in one process
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def age(path: Path, seconds: float = 10_000) -> None:
    """As if all of it had been written long ago."""
    for file in [path, *path.rglob("*")]:
        moment = file.stat(follow_symlinks=False).st_mtime - seconds
        os.utime(file, (moment, moment), follow_symlinks=False)
