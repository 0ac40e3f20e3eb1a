"""Where results go: files, links, pipes, devices; what cannot be written; who stops reading.

No test names anything in /dev: a fault that renames over devices would break the machine it runs on.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shape_sweeps import cli, outputs
from shape_sweeps.errors import InputError, OutputError
from shape_sweeps.outputs import prepare
from shape_sweeps.streams import Stream, guarded_streams

ONE = ["run", "--shapes", "3x4x5,6x7x8", "--dtypes", "bf16", "--epilogues", "gate", "--device", "cpu"]
PROGRAM = [sys.executable, "-m", "shape_sweeps"]


def write(path: Path, text: str = "new") -> None:
    prepare(str(path), "--json").write(text)


# -- what is at the path ----------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text("old")
    path.chmod(0o640)
    with path.open() as reader:
        write(path)
        assert reader.read() == "old"  # whoever has it open keeps what they read
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    write(tmp_path / "sweep.json")
    (tmp_path / "other").touch()
    assert (tmp_path / "sweep.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_preparing_leaves_no_trace(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("old")
    before = old.stat()
    prepare(str(old), "--json")
    prepare(str(tmp_path / "new"), "--csv")
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "old"
    assert old.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("exists", [True, False])
def test_links_are_followed(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    target, link, outer = folder / "target", tmp_path / "link", tmp_path / "outer"
    if exists:
        target.write_text("old")
    link.symlink_to("folder/target")
    outer.symlink_to(link)
    write(outer)
    assert outer.is_symlink() and link.is_symlink() and not target.is_symlink()
    assert target.read_text() == "new" and list(folder.iterdir()) == [target]


def test_links_in_a_circle_are_bad_input(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(InputError, match="cannot be written"):
        prepare(str(tmp_path / "a"), "--json")


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_written_to_and_stays(tmp_path: Path, linked: bool) -> None:
    pipe = named = tmp_path / "pipe"
    os.mkfifo(pipe)
    if linked:
        named = tmp_path / "link"
        named.symlink_to(pipe)
    received: list[str] = []
    output = prepare(str(named), "--json")  # does not wait for a reader
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    output.write("new")
    reader.join(10)
    assert received == ["new"] and pipe.is_fifo() and sorted(tmp_path.iterdir()) == sorted({pipe, named})


def test_a_pipe_whose_reader_leaves_is_an_output_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    output = prepare(str(pipe), "--json")
    reader = threading.Thread(target=lambda: pipe.open("rb").close())
    reader.start()
    with pytest.raises(OutputError, match=r"^--json: cannot write '.*pipe': Broken pipe$"):
        output.write("x" * 10_000_000)
    reader.join(10)
    assert pipe.is_fifo()


def test_a_terminal_is_written_to(tmp_path: Path) -> None:
    """The only device here: one of our own, in a folder that takes no files."""
    ours, theirs = os.openpty()
    try:
        output = prepare(os.ttyname(theirs), "--json")
        assert not output.regular
        output.write("new\n")
        assert os.read(ours, 100) == b"new\r\n"
        assert stat.S_ISCHR(os.stat(os.ttyname(theirs)).st_mode)
    finally:
        os.close(ours)
        os.close(theirs)


def test_an_open_file_without_a_name_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    with path.open("w+") as file:
        path.unlink()
        write(Path(f"/proc/self/fd/{file.fileno()}"))
        file.seek(0)
        assert file.read() == "new"
    assert not list(tmp_path.iterdir())


def test_a_socket_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(InputError, match="is a socket"):
            prepare("socket", "--json")


def test_a_folder_that_takes_no_files_still_has_writable_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single file that is mounted into a container, for one: it cannot be replaced, but written."""
    path = tmp_path / "sweep.json"
    path.write_text("something old")

    def fail(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(outputs.os, "replace", fail)
    write(path)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_one_file_for_two_outputs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to("sweep")
    assert cli.main([*ONE, "--json", str(tmp_path / "sweep"), "--csv", str(tmp_path / "link")]) == 2
    assert "--csv: " in capsys.readouterr().err and not (tmp_path / "sweep").exists()


def test_a_name_for_standard_output_is_standard_output(tmp_path: Path) -> None:
    """The report makes way for the document, and what the shell has opened is not replaced."""
    path = tmp_path / "out"
    with path.open("w") as file:
        done = subprocess.run([*PROGRAM, *ONE, "--json", str(path)], stdout=file, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "2 passed" in done.stderr
    assert json.loads(path.read_text())["summary"]["passed"] == 2


# -- what cannot be written -------------------------------------------------------------------------------


def test_a_file_that_cannot_be_finished_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "sweep.json"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs.os, "replace", fail)
    with pytest.raises(OutputError, match=r"cannot write .*: No space left on device"):
        write(target)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_one_line_after_the_report(tmp_path: Path) -> None:
    """For real, with a limit on the size of files in place of a full disk."""
    path = tmp_path / "sweep.json"
    path.write_text("old")
    done = subprocess.run(
        [*PROGRAM, *ONE, "--json", str(path), "--csv", str(tmp_path / "sweep.csv")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
    )
    assert done.returncode == 2 and done.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    assert done.stderr == f"shape-sweeps: error: --json: cannot write {str(path)!r}: File too large\n"
    assert path.read_text() == "old"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["sweep.csv", "sweep.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_file_that_is_read_only_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.touch(0o444)
    with pytest.raises(InputError, match="Permission denied"):
        prepare(str(path), "--json")


# -- standard output --------------------------------------------------------------------------------------


class Failing(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device"), 2, "cannot write to standard output: No space left on device"),
        (ValueError("I/O operation on closed file"), 2, "cannot write to standard output: I/O operation"),
    ],
)
@pytest.mark.parametrize("arguments", [ONE, ["list"], ["--help"], [*ONE, "--json", "-"]], ids=" ".join)
def test_a_report_that_cannot_be_written(
    error: Exception,
    code: int,
    message: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(error))
    assert cli.main(arguments) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert sys.stdout is not None and isinstance(sys.stdout, Failing)


def test_without_reader_and_outputs_the_sweep_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from shape_sweeps import runner

    def fail(*_: Any) -> Any:
        raise AssertionError("a case was run")

    monkeypatch.setattr(runner, "_run", fail)
    monkeypatch.setattr(sys, "stdout", Failing(BrokenPipeError()))
    assert cli.main(ONE) == 141


def test_without_reader_the_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sweep.json"
    monkeypatch.setattr(sys, "stdout", Failing(BrokenPipeError()))
    assert cli.main([*ONE, "--json", str(path)]) == 141
    assert json.loads(path.read_text())["summary"]["passed"] == 2


def test_a_pipe_that_is_closed_early_for_real(tmp_path: Path) -> None:
    """Nothing from the interpreter at its exit, either."""
    path = tmp_path / "sweep.json"
    process = subprocess.Popen([*PROGRAM, *ONE, "--json", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() in (0, 141)  # 0: all was in the pipe already
    assert json.loads(path.read_text())["summary"]["passed"] == 2


@pytest.mark.parametrize("redirections", [">&-", ">&- 2>&-"])
def test_closed_streams_do_no_harm(tmp_path: Path, redirections: str) -> None:
    path = tmp_path / "sweep.json"
    command = f'"$0" "$@" {redirections}'
    done = subprocess.run(["sh", "-c", command, *PROGRAM, *ONE, "--json", str(path)], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert json.loads(path.read_text())["summary"]["passed"] == 2


def test_a_document_for_a_closed_stream_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert cli.main([*ONE, "--json", "-"]) == 2
    assert err.getvalue() == "shape-sweeps: error: --json: standard output is closed\n"


def test_characters_that_a_stream_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert cli.main(["list"]) == 0
    assert b"tile edges \\xb11" in raw.getvalue()


def test_streams_are_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with guarded_streams() as stdout:
        assert isinstance(sys.stdout, Stream)
        print("text")
    assert (sys.stdout, sys.stderr) == before and stdout.error is None
    assert capsys.readouterr().out == "text\n"


# -- interrupts -------------------------------------------------------------------------------------------


def test_the_entry_imports_nothing_slow() -> None:
    code = "import sys, shape_sweeps.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_everything_that_is_exported_is_there() -> None:
    import shape_sweeps

    for name in shape_sweeps.__all__:
        assert getattr(shape_sweeps, name) is not None and name in dir(shape_sweeps)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = shape_sweeps.absent


_IMPORTING = """
import os, signal, sys
from shape_sweeps import cli
with cli._interruptible():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # what an extension module may do with an exception
        pass
    print("went on", flush=True)
"""


def test_an_interrupt_of_imports_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTING],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "shape-sweeps: interrupted\n")


def test_interrupts_are_as_before_when_the_imports_are_done() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with cli._interruptible():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_starting_is_one_line() -> None:
    """Whenever it comes, once the program itself has started."""
    code = "import shape_sweeps.cli as cli, sys; print(flush=True); sys.exit(cli.main(sys.argv[1:]))"
    for delay in (0.0, 0.1, 0.3, 0.6):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *ONE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 + delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        if process.returncode != 0:  # it was faster
            assert process.returncode == 130, (delay, out, err)
            assert err == "shape-sweeps: interrupted\n" or "; interrupted, " in out


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As in a background job of a shell script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli._interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
