"""One tool that floods the log leaves what others wrote, and the log stays bounded."""

import json

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, sandbox, wait_until

TOOL = """\
def loud(ctx, input):
    for number in range(input["lines"]):
        ctx.logger.info("noise %d %s" % (number, "x" * 1000))
    return "done"


def quiet(ctx, input):
    ctx.logger.info("evidence of %s" % input["what"])
    return "done"


handlers = {"loud": loud, "quiet": quiet}
"""
DOCUMENT = "---\n" + documents(
    "Tool noise {entry: ./noise.py, exports: [{name: loud}, {name: quiet}]}",
)


def test_a_flood_is_cut_where_it_is_written_and_says_so() -> None:
    with sandbox(BUNDLE.replace("Tool/bash", "Tool/noise") + DOCUMENT) as kernel:
        (kernel.home / "noise.py").write_text(TOOL)
        kernel.detach()

        def call(export: str, instance: str, **arguments: object) -> None:
            said = kernel.gdn("call", f"noise__{export}", json.dumps(arguments), "--json", "--instance", instance)
            assert said.status == 0, said.out + said.err

        call("quiet", "one", what="before")
        call("loud", "two", lines=8_000)
        call("quiet", "three", what="after")
        log = wait_until(lambda: text if "suppressed" in (text := kernel.log("toolhost")) else None)
        assert len(log) < 3 << 20, "8 MB of noise of one instance"
        assert log.index("evidence of before") < log.index("evidence of after")
        notes = [json.loads(line) for line in log.splitlines() if '"suppressed":' in line]
        assert {(note["tool"], note["instanceKey"]) for note in notes} == {("noise", "two")}
        shown = kernel.gdn("logs", "--role", "toolhost", "--lines", "100000").out
        assert "lines suppressed: too many at once" in shown
