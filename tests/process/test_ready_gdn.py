"""What the other tests run in place of a `gdn` that a shell starts is the same to who looks at it."""

from __future__ import annotations

import subprocess

import pytest

from tests.kernel_fixture import Sandbox


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (("--version",), None),
        (("no-such-command", "--json"), None),
        (("ps",), None),
        (("validate", "-", "--json"), b"kind: Nonsense\n"),
        (("send", "-", "--json"), "토큰".encode()),
    ],
)
def test_a_forked_gdn_says_and_ends_as_one_that_is_started(
    kernel: Sandbox, arguments: tuple[str, ...], data: bytes | None
) -> None:
    forked = kernel.gdn(*arguments, input=data)
    process = kernel.popen(*arguments, forked=False, stdin=subprocess.DEVNULL if data is None else subprocess.PIPE)
    out, err = process.communicate(data, timeout=30)
    assert (forked.status, forked.out, forked.err) == (process.returncode, out.decode(), err.decode())


def test_one_that_does_not_end_is_ended(kernel: Sandbox) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        kernel.gdn("logs", "-f", timeout=0.3)


def test_its_environment_and_its_folder_are_those_that_are_given(kernel: Sandbox) -> None:
    kernel.here = kernel.home / "elsewhere"
    kernel.here.mkdir()
    (kernel.here / "there.yaml").write_text(kernel.bundle.read_text())
    assert kernel.gdn("validate", "there.yaml").status == 0
    kernel.here = None
    assert kernel.gdn("validate", "there.yaml").status != 0
    kernel.bundle.write_text(kernel.bundle.read_text().replace("tools:", "prompt: {system: '${MINE}'}\n  tools:"))
    missing = kernel.gdn("validate")
    assert (missing.status, "MINE" in missing.out + missing.err) == (2, True)
    kernel.env["MINE"] = "here"
    assert kernel.gdn("validate").status == 0
