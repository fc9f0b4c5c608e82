"""The command line, in processes of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from .conftest import DATA, heed_ctrl_c, run_cli

TINY = DATA / "tiny" / "llama-q4_0.powerinfer.gguf"


def test_generate_streams_to_stdout_and_notes_to_stderr(demo):
    out = run_cli("generate", "-p", "The capital of France is", "-n", 6, "--temp", 0)
    assert out.returncode == 0
    text = demo.generate("The capital of France is", max_tokens=6, temperature=0).text
    assert out.stdout.decode() == f"The capital of France is{text}\n"
    notes = out.stderr.decode()
    assert "dense FFN (silu)" in notes
    assert "text 6 tokens" in notes
    quiet = run_cli("generate", "-p", "The capital of France is", "-n", 6, "--temp", 0, "-q", "--no-echo")
    assert quiet.stdout.decode() == f"{text}\n"
    assert quiet.stderr == b""


def test_generate_json_and_prompt_files(demo, tmp_path):
    (tmp_path / "p.txt").write_text("Zürich liegt in")
    runs = [
        run_cli("generate", "-f", tmp_path / "p.txt", "-n", 4, "-s", 1, "--json"),
        run_cli("generate", "-f", "-", "-n", 4, "-s", 1, "--json", stdin="Zürich liegt in".encode()),
    ]
    for out in runs:
        assert out.returncode == 0, out.stderr
        report = json.loads(out.stdout)
        assert report["text"] == demo.generate("Zürich liegt in", max_tokens=4, seed=1).text
        assert report["finish_reason"] == "length"
        assert report["timings"]["generated_tokens"] == 4
        assert report["stats"]["device"] == "cpu"


def test_all_of_powerinfers_flags():
    flags = ["-m", TINY, "-n", 3, "-t", 1, "-p", "hi", "--vram-budget", 0, "--temp", 0.5, "--top-k", 5]
    flags += ["--top-p", 0.9, "--min-p", 0.1, "--seed", 1, "--ctx", 64, "--sparsity", "exact", "--sparse-threshold", 0]
    out = run_cli("generate", *flags)
    assert out.returncode == 0, out.stderr
    assert b"exact FFN (relu)" in out.stderr


def test_special_tokens_only_when_asked_for():
    text = "<|im_start|>"
    assert json.loads(run_cli("tokenize", text, "--json", "--special").stdout)["ids"] == [1]
    ids = json.loads(run_cli("tokenize", "--json", stdin=text.encode()).stdout)["ids"]
    assert len(ids) > 1
    shown = run_cli("tokenize", "Hello wörld").stdout.decode()
    assert shown.split() == ["19556", "'Hello'", "267", "'", "w'", "29989", "'ör'", "400", "'ld'"]


def test_inspect():
    out = run_cli("inspect", TINY)
    assert out.returncode == 0
    shown = out.stdout.decode()
    for word in ("llama.embedding_length", "Q4_0", "predictors: yes", "PWRI version 3", "at full context"):
        assert word in shown
    assert "blk.0.fc1.weight" in run_cli("inspect", TINY, "--tensors").stdout.decode()
    report = json.loads(run_cli("inspect", TINY, "--json").stdout)
    assert report["predictors"] is True
    assert report["memory"]["kv_cache_per_token"] == 2 * 2 * 3 * 32


def test_bench():
    out = run_cli("bench", "-m", TINY, "-p", 8, "-n", 4, "-r", 2, "--json")
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout)
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "streaming_read_bytes_per_second"):
        assert report[name]["min"] <= report[name]["median"] <= report[name]["max"]
    assert report["bytes_per_token"] > 1000
    assert 0 < report["bandwidth_fraction"] < 1
    assert b"decode 4" in run_cli("bench", "-m", TINY, "-p", 0, "-n", 4, "-r", 1).stdout


@pytest.mark.parametrize(
    "args",
    [
        ["generate"],
        ["generate", "-p", "a", "-f", "b"],
        ["generate", "-p", "a", "--top-p", "3"],
        ["generate", "-p", "a", "-n", "x"],
        ["generate", "-p", "a", "--sparsity", "half"],
        ["bench", "-p", "0", "-n", "0"],
        ["inspect", "a", "b"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_is_exit_2(args):
    out = run_cli(*args)
    assert out.returncode == 2
    assert b"Traceback" not in out.stderr
    assert out.stdout == b""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "-m", "nowhere.gguf", "-p", "a"], "nowhere.gguf"),
        (["inspect", __file__], "magic"),
        (["generate", "-m", TINY, "-p", "a", "--kv-type", "q8_0"], "kv_type"),
        (["generate", "-m", TINY, "-p", "word " * 400], "context full"),
        (["generate", "-f", "nowhere.txt"], "nowhere.txt"),
        (["generate", "-p", "a", "--repeat-penalty", "0"], "repeat_penalty"),
    ],
)
def test_a_failure_is_one_line_and_exit_1(args, words):
    out = run_cli(*args)
    assert out.returncode == 1, out
    lines = [line for line in out.stderr.decode().splitlines() if "mapped on" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("powerinfer: error: ")
    assert words in lines[0]
    assert b"Traceback" in run_cli(*args, "--debug").stderr


def test_help_and_version():
    assert run_cli("--version").stdout.startswith(b"powerinfer-rs 0.")
    for command in ("generate", "inspect", "tokenize", "bench"):
        out = run_cli(command, "--help")
        assert out.returncode == 0
        assert b"Usage" in out.stdout


def test_ctrl_c_is_exit_130():
    command = [sys.executable, "-m", "powerinfer_rs", "generate", "-p", "Once", "-n", "-1", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c)
    assert process.stdout.read(8)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m powerinfer_rs generate -q -p Once -n 200 --ignore-eos | head -c 5"
    out = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, timeout=60)
    assert out.stdout == b"Once "[:5] or len(out.stdout) == 5
    assert out.stderr == b""
