"""Files of a model are sent in order, some at once, and none is sent past one that failed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ckptflow.publish.inorder import GoOn, send_in_order
from ckptflow.publish.model import LocalFile
from publishing import MIB

AT_ONCE = 3


def large_files(count: int) -> list[LocalFile]:
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    return [LocalFile(name=name, path=Path(name), bytes=100 * MIB, sha256="") for name in names]


def test_a_large_file_begins_when_the_one_before_it_reads() -> None:
    files = large_files(3)
    second_was_called, entered = threading.Event(), []

    def send(file: LocalFile, go_on: GoOn) -> str:
        entered.append(file.name)
        if file is files[0]:
            assert not second_was_called.wait(0.1)
        if file is files[1]:
            second_was_called.set()
        go_on()
        if file is files[0]:
            assert second_was_called.wait(10)
        return file.name

    names = [file.name for file in files]
    assert send_in_order(files, send, first=names[0], large_at_once=AT_ONCE) == names
    assert entered == names


def test_no_file_is_read_after_one_before_it_failed() -> None:
    files, sent = large_files(3), []

    def send(file: LocalFile, go_on: GoOn) -> str:
        go_on()
        if file is files[1]:
            raise PermissionError(file.name)
        while file is files[2]:
            go_on()
            time.sleep(0.01)
        sent.append(file.name)
        return file.name

    with pytest.raises(PermissionError, match=files[1].name):
        send_in_order(files, send, first=files[0].name, large_at_once=AT_ONCE)
    assert sent == [files[0].name]
