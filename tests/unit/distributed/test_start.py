"""The start of torch.distributed from a launcher's variables."""

from __future__ import annotations

import socket

import pytest
import torch

from megaaccum.distributed import start
from megaaccum.errors import ConfigError, LaunchError


def test_a_default_device_on_which_hosts_could_not_agree_is_refused():
    with torch.device("meta"), pytest.raises(ConfigError, match="torch's default device is meta, where host memory"):
        start.start_process_group(None)


def test_a_name_that_no_host_knows_is_one_error_that_names_its_variable(monkeypatch, capsys):
    now, asked = [0.0], []

    def unknown(*name):
        asked.append(name)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(start.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(start.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(start.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    words = r"MASTER_ADDR is nowhere, which this host cannot resolve \(Name or service not known\): set it to"
    with pytest.raises(LaunchError, match=words):
        start._await_name("nowhere", 3.0)
    assert len(asked) == 5
    assert capsys.readouterr().err.count("MASTER_ADDR is nowhere") == 1


def test_a_name_that_is_known_later_is_waited_for(monkeypatch):
    answers = iter([socket.gaierror(socket.EAI_NONAME, "not yet"), None])

    def resolve(*name):
        if problem := next(answers):
            raise problem

    monkeypatch.setattr(start.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(start.time, "sleep", lambda seconds: None)
    start._await_name("rank-0", 3.0)
    assert next(answers, "asked twice") == "asked twice"
