"""What installers say about themselves, and which program of a package is meant."""

from __future__ import annotations

import pytest

from goondan.features.mcp.command.add import hosts_of, npm_settings, pip_settings, reachable
from goondan.features.mcp.command.rules.packages import (
    Installed,
    PackageCommand,
    arguments,
    bundle_text,
    package_command,
    program_of,
)
from goondan.kernel.bundle.rules.positions import Allowance, compose, plain


def command(text: str) -> PackageCommand:
    found = package_command(text.split())
    assert found is not None
    return found


def test_npm_settings_that_are_not_set_are_none() -> None:
    text = "registry=https://npm.example/path/\nstrict-ssl=true\nproxy=null\nhttps-proxy=null\n@a:registry=undefined\ncafile=\n"
    assert npm_settings(text) == {"registry": "https://npm.example/path/", "strict-ssl": "true"}


def test_what_counts_most_of_pips_settings_is_taken() -> None:
    text = (
        "global.index-url='https://a.example/simple'\ninstall.index-url='https://b.example/simple'\n"
        ":env:.find-links='/x\\n/y'\nglobal.find-links='/z'\nglobal.timeout='60'\nnonsense\nglobal.bad=unquoted\n"
    )
    assert pip_settings(text) == {"index-url": "https://b.example/simple", "find-links": "/x /y", "timeout": "60"}


def test_hosts_of_urls() -> None:
    urls = ["https://a.example/x", "http://b.example:8080/", "http://[::1]:81", "https://u:p@c.example", "/path", "file:///x",
            "https://a.example/y", "ftp://d.example", "http://x:notaport/"]  # fmt: skip
    assert hosts_of(urls) == ["a.example:443", "b.example:8080", "[::1]:81", "c.example:443"]


def test_an_address_needs_no_way_around() -> None:
    assert reachable(["127.0.0.1:4873", "no-such-host.invalid:443"]) == (
        ["127.0.0.1:4873", "no-such-host.invalid:443"],
        {},
    )
    grants, via = reachable(["localhost:4873"])
    assert grants[0] == "localhost:4873"
    assert all(grant in grants for grant in via.values())


@pytest.mark.parametrize(
    ("text", "programs", "expected"),
    [
        ("npx -y @s/server", {"mcp-server": "a.js"}, "a.js"),
        ("npx -y @s/server", {"server": "a.js", "other": "b.js"}, "a.js"),
        ("npx -y @s/server", {"one": "a.js", "other": "b.js"}, None),
        ("npx -y -p @s/server other", {"server": "a.js", "other": "b.js"}, "b.js"),
        ("npx -y -p @s/server none", {"server": "a.js"}, None),
        ("uvx --from p prog", {"prog": "venv/bin/prog"}, "venv/bin/prog"),
        ("uvx p", {}, None),
    ],
)
def test_which_program_is_meant(text: str, programs: dict[str, str], expected: str | None) -> None:
    assert program_of(command(text), Installed("1", programs, 1)) == expected


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("npx -y @s/p@^1", "@s/p@^1"),
        ("npx p", "p"),
        ("uvx p@1.2", "p==1.2"),
        ("uvx --from p[a,b]>=2 x", "p[a,b]>=2"),
        ("uvx p", "p"),
        ("uvx --with m<2 p", "p m<2"),
    ],
)
def test_the_installer_is_asked_for_what_was_asked_for(text: str, package: str) -> None:
    assert arguments(command(text), "/f", ["npm"], {}, {}, None)["packages"] == package.split()


def test_the_bundle_grants_what_is_named_and_nothing_else() -> None:
    (document,) = compose(bundle_text('/a "b"', ["h.example:443"], ["/opt/x", "/opt/x"]), Allowance()).documents
    sandbox = plain(document)["spec"]["sandbox"]
    assert sandbox["network"] == {"allow": ["h.example:443"]}
    assert sandbox["filesystem"] == {"write": ['/a "b"'], "read": ["/opt/x"]}
    (offline,) = compose(bundle_text("/a", [], []), Allowance()).documents
    assert plain(offline)["spec"]["sandbox"]["network"] == "none"
